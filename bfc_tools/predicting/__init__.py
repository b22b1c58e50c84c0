"""How much GPU memory a PyTorch program will need, found without a GPU.

The program runs on tensors that are only shapes. What its operators would allocate goes to a
`CachingAllocator` on a simulated device. torch is imported when a prediction begins. The files
stand on eight floors, `language < gpu < system < values < rules < record < world < session`, which
`tests/repo/test_floors.py` lists. In order:

    kernel.py             mounts of a process's own, and Landlock
    ordinal.py            the number of the GPU, as the program calls it
    letters.py            what processes send to one another
    devices.py            the usual GPUs
    releases.py           in what releases of PyTorch differ
    changes.py            changes of a program that can be tried
    cudnn.py              cuDNN itself, asked what a convolution works in
    file_layer.py         files of a program, kept apart by functions of Python
    outside.py            the process that stays outside, while a script runs apart
    guard.py              a device "cuda" in a PyTorch that has none
    arrivals.py           modules that are changed once they are imported
    kinds.py              what an allocation is for
    host_numbers.py       numbers that processes send by way of the GPU
    rules/                what CUDA's operators allocate beside their results
    places.py             where in the program: module, line, phase
    memory.py             the device's memory, and what happened to it
    imagined.py           memory that a program only seems to take
    even_choices.py       numbers that were drawn, and how many are alike
    real_values.py        values that stand in files and arrays
    conditions.py         what a condition is that is not known
    known_values.py       tensors that are filled with one number
    about.py              what is known of an operator
    recorder.py           runs each operator, and follows the storages
    hooks.py              modules, backward passes and optimizers
    fake_torch.py         what is replaced in PyTorch
    legacy_types.py       `torch.cuda.FloatTensor` and its like
    cuda_module.py        what `torch.cuda` answers
    nvml.py               what `pynvml` answers
    lengths.py            steps that differ only in a length
    generation.py         `generate` of transformers, of whose tokens a few are run
    changing.py           changes of a program, while it runs
    repeats.py            a step that is made again and again
    holders.py            what holds the memory at the peak
    unsure.py             between which figures it lies
    verdict.py            whether it fits
    text.py               what is said of it
    summary.py            the same as a comment on a pull request
    prediction.py         what was found
    session.py            `bfc.predict`
    stopping.py           when a program has run long enough
    waiting.py            what a program is doing that makes no step
    evaluations.py        passes of evaluations that are alike
    endings.py            signals, and other ends of its process
    script.py             a script, run as `python` would run it
    failures.py           what is said of a script that failed
    asked.py              a program, and what is asked of it
    axes.py               an argument that is varied
    bounds.py             a search for the largest value that fits
    tries.py              many predictions, each in a process
    distant.py            what workers of a cluster do for a search
    clusters.py           clusters of Dask and Ray in place of this machine's cores
    largest.py            `bfc.largest`
    world.py              the processes of a program, and which are alike
    ranks.py              what each of these needs
    search.py             the same for arguments of scripts
    cheapest.py           the GPUs on which a script fits
    whatif.py             what a script needs with each of the changes
    serves.py             whether a model serves, and how much
"""
