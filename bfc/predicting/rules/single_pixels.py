"""When cuDNN leaves a convolution of single pixels to cublasLt, whose channels lie in planes.

A GPU has engines of cuDNN that call cublasLt, and one that is only described has none: the other
engines come in the same order there. cuDNN orders them by the time that it expects of each, which
is in no plan. cublasLt multiplies planes as they lie, image by image, and keeps a sum of weights
for each image. The others copy all pixels first. So what speaks for them are many channels, larger
sums than copies, and planes whose rows are not aligned.

Where the one gives way to the other was fitted to every second of 10,720 convolutions in planes, of
usual shapes, which an H100 planned with cuDNN 9.19. Of the others 92 to 96 % of each pass are told
rightly in 32 bits, and in 16 bits 88 % of the results, 93 % of the gradients of images and 83 % of
the gradients of weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from bfc.predicting.cudnn import Plan

FLOAT = 4
#: In 16 bits: an engine that others are taken for, unless pixels are aligned for it; engines that
#: are not given up for cublasLt.
FOR_HOPPER, OF_IMAGES = 62, (22, 73)
#: The same for weights in 32 bits, which are summed where they lie; and in 16.
OF_WEIGHTS, OF_WEIGHTS_IN_16 = (0, 1, 20, 48), (0,)
#: Channels of both sides, as `Planes.channels_together`, up to which cublasLt is taken.
MOST_CHANNELS, MOST_UNALIGNED, MOST_OF_WEIGHTS, MOST_OF_ODD = 512, 223, 116, 45
#: Channels of one side that the gradient of images leaves to cublasLt, or so many for each pixel.
MANY_CHANNELS, CHANNELS_OF_PIXEL = 1856, 0.64
#: Sums of weights, and copies that a plan takes, in units of copies of all.
SUMS_IN_RESULT, SUMS_IN_32, SUMS_IN_16, SUMS_OF_ODD, COPIES, PARTS = 0.4, 1.2, 1.7, 1.1, 1.01, 1.4
#: Sums of weights that are little, with so many channels for a pixel at most.
LITTLE_SUMS, LITTLE_CHANNELS = 64 << 20, 9
#: So few channels are copied, unless there are fewer, or a plan takes less than so much.
FEW_CHANNELS, FEWER_CHANNELS, LITTLE_PLAN = 13.5, 4, 8 << 20
#: Pixels of an image that are many, the same for odd ones, and few; and of all images.
PIXELS, ODD_PIXELS, FEW_PIXELS, ALL_PIXELS, FEW_OF_ALL = 488, 800, 150, 13600, 1200
#: Numbers in 16 bits that are read at once.
AT_ONCE = 8


@dataclass(frozen=True)
class Planes:
    """A convolution of single pixels."""

    images: int
    channels: int
    out: int  # channels of the result
    pixels: int  # of an image
    size: int  # bytes of a number
    plan: Plan  # what cuDNN would do without cublasLt

    def in_cublas(self, gradient: str) -> bool:
        """Whether cublasLt computes the "result", or the gradient of "images" or "weight"."""
        if gradient == "weight":
            return self._weight_in_16() if self.size == 2 else self._weight()
        if gradient == "images":
            return self._images()
        if self.size == 2:
            unaligned = self.pixels % AT_ONCE and self.plan.engine == FOR_HOPPER
            return not unaligned or self.channels_together < MOST_UNALIGNED
        few = self.channels_together <= MOST_CHANNELS
        return few or (not self._shares and self._sums < SUMS_IN_RESULT)

    @property
    def channels_together(self) -> float:
        """How much a copy pays: the numbers that are multiplied for each that is copied."""
        return self.channels * self.out / (self.channels + self.out)

    @property
    def _copies(self) -> int:
        return self.images * self.pixels * (self.channels + self.out) * self.size

    @property
    def _sums(self) -> float:
        """The bytes of the sums of all images, in units of copies."""
        return self.images * self.channels * self.out * FLOAT / self._copies

    @property
    def _shares(self) -> bool:
        return self.plan.kernel is not None and self.plan.kernel.splits

    def _images(self) -> bool:
        if self.size == 2:
            return self.plan.engine not in OF_IMAGES
        few = max(self.channels, self.out) <= MANY_CHANNELS
        return few or self.out <= CHANNELS_OF_PIXEL * self.pixels or self._shares

    def _weight(self) -> bool:
        if self.plan.engine in OF_WEIGHTS:
            return False
        few = FEWER_CHANNELS < self.channels_together <= FEW_CHANNELS
        if few and self.plan.workspace >= LITTLE_PLAN:
            return False
        little = self._sums * self._copies <= LITTLE_SUMS
        return self._sums <= SUMS_IN_32 or (
            little and self.channels <= LITTLE_CHANNELS * self.pixels
        )

    def _weight_in_16(self) -> bool:
        if self.plan.engine in OF_WEIGHTS_IN_16:
            return False
        taken = self.plan.workspace / self._copies
        if self.pixels % AT_ONCE == 0:
            return self._sums <= SUMS_IN_16 or taken > PARTS or self.pixels > PIXELS
        if self.pixels % 2 == 0:
            some = FEW_OF_ALL <= self.images * self.pixels <= ALL_PIXELS
            return not some or self.channels_together < MOST_OF_WEIGHTS
        if taken > COPIES:  # the sum has parts
            return self.pixels < ODD_PIXELS or self.channels_together < MOST_OF_ODD
        return self._sums < SUMS_OF_ODD and self.pixels > FEW_PIXELS
