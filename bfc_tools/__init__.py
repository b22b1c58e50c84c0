"""The commands, and what they are made of: they read recorded runs, and predict runs. bfc hands out
memory; bfc_tools looks at what programs did with it, or would do.

Users reach it through `bfc`: the command, `bfc.study`, and functions such as `bfc.predict`.
In order:

    scratch.py      folders for files, removed however a process ends
    mistakes.py     what is said of an error that ends a command
    study/          what a run needs under other settings, and what grew between two
    models/         models by name, and programs that run them
    predicting/     PyTorch's programs, without a GPU
    browser/        a run as a page for the browser
    museum/         published reports of odd memory, reproduced
    cli/            the command `bfc`
    startup/        what Python reads at its start below `bfc run`
    command.py      where it begins
"""
