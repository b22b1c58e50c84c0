"""Models by name: a configuration in place of a program, and the programs that are run with it.

A name is that of a folder with a config.json, of a model whose config.json lies in Hugging Face's
cache, or of a class of transformers. Nothing here asks a network. In order:

    names.py         from a name to a configuration
    options.py       what is asked of a program
    quantized.py     what quantized weights take
    building.py      the model, made by transformers
    caches.py        what a decoder keeps of each token
    engines.py       the arithmetic of vLLM and SGLang
    serving.py       what these have room for on a GPU
    train.py         the program that trains it
    serve.py         the program that serves it
"""
