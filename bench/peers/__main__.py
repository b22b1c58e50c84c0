"""Fetch and compile every original that is not there yet: `python -m bench.peers`.

Tests that run side by side would each do it otherwise.
"""

from bench.peers import tensorflow, torch, torch_host, torch_viz
from bench.report import say


def main() -> None:
    say(str(tensorflow.build()))
    for version in torch.PACKAGES:
        say(str(torch.build(version=version)))
    for version in torch_host.VERSIONS:
        say(str(torch_host.build(version)))
    say(str(torch_viz.build()))


if __name__ == "__main__":
    main()
