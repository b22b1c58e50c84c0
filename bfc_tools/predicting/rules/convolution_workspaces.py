"""How much memory cuDNN works in when it convolves: estimates, since only a device knows.

On tensor cores cuDNN computes with the channels of a pixel side by side. Images, weights and
results in another layout are converted, but for convolutions of single pixels, which are products
of matrices where they lie. For the gradient of the weights the sum over all pixels is split between
multiprocessors, and each part keeps a sum of its own in 32 bits, in whole tiles.

First measured with cuDNN 9.19 on an H200, in 174 convolutions and 15 programs, then on an H100, in
36,735 passes of 12,000 convolutions: 75 % of the estimates are within 1 MiB or 1 %, and 40 % right
to the byte. The constants were chosen by these, so others may be met less well. Without tensor
cores nothing is estimated. What is not met: large kernels, for which FFTs take up to GiBs, and
engines that a GPU prefers by a model of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bfc_tools.predicting.cudnn import Plan
from bfc_tools.predicting.rules import orders, shared_sums
from bfc_tools.predicting.rules.tensors import div_up, nbytes, numel

FLOAT = 4
#: cuDNN adds so much to what it converts: 16 bytes, or 147.
SOME_MORE = 16
#: So few channels are padded to eight in 16 bits, and have algorithms of their own.
FEW, PADDED = 4, 8
#: Kernels from which few channels are converted in the forward pass, and for the weights; in 16
#: bits the sums of weights take about so much there.
WIDE, WIDE_OF_WEIGHTS = 5, 4
SUMS_OF_WIDE = 4 << 20
ALIGNED = 16
LITTLE_IMAGE = 49
MIB = 1 << 20
#: The elements of a sum that one multiprocessor keeps of few channels, 64 by 64.
SMALL_TILE, SMALL_CHANNELS = 64 * 64, 64
#: In 32 bits few channels are padded to four, and their sums have so many parts at most, of
#: so many pixels at least, and so many bytes at most.
PADDED_OF_WEIGHTS, PARTS_OF_FEW, PIXELS_OF_FEW, SUMS_OF_FEW = 4, 64, 1024, 3 * MIB
#: Weights of one small tile are summed over the whole batch where an image has more pixels.
MANY_PIXELS = 16384
#: In 16 bits each channel for itself, of images in a plane, has so many parts of the sum for each
#: image; channels are padded to a multiple, and sums of fewer images and pixels have no parts.
PARTS_OF_CHANNELS, PADDED_ALONE, IMAGES_ALONE, PIXELS_ALONE = 8, 32, 8, 1024
HOPPER = (9, 0)
#: The engine of cuDNN 9.19 that convolves each channel for itself in float16.
ALONE_IN_16 = 61
#: Those that other engines take the place of on an H100.
NOT_ON_DEVICE, NOT_IN_PLANES = {"result": (22, 57), "images": (22, 62)}, (9, 10)
COMMON_KERNELS = (1, 3, 5, 7)
#: Of Winograd's algorithm, by the side of a kernel: the pixels of a tile's side, the numbers that a
#: tile becomes, and a number of which that of the images is made a multiple.
WINOGRAD = {3: (4, 36, 1), 5: (9, 169, 16)}
#: The least and the greatest side of images that are transformed as Fourier does.
LEAST_SIDE, GREATEST_SIDE = 32, 64
#: The channels of a tile in cublasLt; the tiles that all parts of a sum have for each
#: multiprocessor at most, the pixels of a part at least, and the bytes beside the sums.
TILE, CUBLAS_IN_32, CUBLAS_IN_16 = 128, (2, 128, 256), (1, 2000, 272)
#: What its kernels for Hopper take in 32 bits, and in 16. It mostly chooses them where tiles are so
#: much of a wave on all multiprocessors: 84 % of 18,531 passes are told rightly.
BESIDE_IN_32, BESIDE_IN_16, WAVE = 400, 272, 0.65
#: The pixels that a part of a sum has at least, and the bytes that count those done: for all,
#: and for each tile of each part.
PIXELS_OF_SHARE, PIXELS_OF_SHARE_IN_16, COUNTERS, COUNTER = 1024, 4096, 131, 4


@dataclass(frozen=True)
class Convolution:
    """A convolution on tensor cores, whose tensors are those of one that is not transposed."""

    images: Any
    weight: Any
    result: Any
    groups: int  # of channels
    strides: tuple[int, ...]  # one for each dimension of a pixel
    last: bool  # whether the channels of a pixel lie side by side
    sms: int  # the GPU's multiprocessors
    dilation: tuple[int, ...] = (1,)

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(int(size) for size in self.weight.shape[2:])

    @property
    def _half(self) -> bool:
        return int(self.weight.element_size()) == 2

    @property
    def _few(self) -> bool:
        return int(self.weight.shape[1]) <= FEW and self.groups == 1

    @property
    def _whole(self) -> bool:
        """Whether each pixel belongs to one result: patches."""
        return self.kernel == self.strides

    @property
    def plain(self) -> bool:
        """Whether a result is made of one pixel, at its place, and of all channels."""
        return self.groups == 1 and self._single

    @property
    def _single(self) -> bool:
        return all(size == 1 for size in (*self.kernel, *self.strides))

    def in_cublas(self, gradient: str, plan: Plan | None = None) -> bool:
        """Whether cuDNN leaves single pixels to cublasLt, which plans nothing without a device. In
        most cases only what it `plan`s else tells."""
        if not self.plain:
            return False
        if plan is None:
            return self.last and gradient != "weight" and not self._few
        return self._of_pixels(gradient, plan) != orders.PLANNED

    def _of_pixels(self, gradient: str, plan: Plan) -> str:
        return orders.of_pixels(gradient, self._half, self.last, plan.order)

    def by_cublas(self, gradient: str, plan: Plan | None = None) -> int:
        """What cublasLt takes for them, in bytes."""
        without = plan is not None and self._of_pixels(gradient, plan) == orders.WITHOUT
        if self.last and gradient == "weight":
            return 0 if without else self.estimate(gradient)
        beside = BESIDE_IN_16 if self._half else BESIDE_IN_32
        sums = self._sums_of_images if gradient == "weight" else 0
        return sums + (beside if self._by_hopper(gradient) and not without else 0)

    def _by_hopper(self, gradient: str) -> bool:
        """Whether cublasLt multiplies with the kernels that take a little memory."""
        out, inputs = map(int, self.weight.shape[:2])
        rows = (out, inputs) if self.last else (self._plane,)
        if any(row * int(self.weight.element_size()) % ALIGNED for row in rows):
            return False
        if gradient == "weight":
            sides = out, inputs
        else:
            sides = self._plane, out if gradient == "result" else inputs
        tiles = int(self.images.shape[0]) * math.prod(div_up(side, TILE) for side in sides)
        return tiles >= WAVE * self.sms

    @property
    def _plane(self) -> int:
        """The pixels of an image."""
        return math.prod(int(size) for size in self.images.shape[2:])

    @property
    def _sums_of_images(self) -> int:
        """A sum of the weights for each image."""
        return int(self.images.shape[0]) * numel(self.weight) * FLOAT

    @property
    def alone(self) -> bool:
        """Whether each channel is convolved for itself."""
        return self.groups > 1 and int(self.weight.shape[1]) == 1

    @property
    def _as_matrices(self) -> bool:
        """Whether pixels are multiplied as they lie: also where they are not aligned, unless an
        image is so little that it is soon copied."""
        return self._single and (self._aligned or self._plane > LITTLE_IMAGE)

    @property
    def _aligned(self) -> bool:
        return self._plane == 1 or self._plane * int(self.images.element_size()) % ALIGNED == 0

    @property
    def _pixels(self) -> int:
        """The pixels of all results: what a gradient of weights sums over."""
        return numel(self.result) // int(self.result.shape[1])

    def _converted(self) -> int:
        """Copies of all, if the channels do not lie side by side: weights of one pixel lie so."""
        if self.last:
            return 0
        weights = nbytes(self.weight) if max(self.kernel) > 1 else 0
        return nbytes(self.images) + weights + nbytes(self.result) + SOME_MORE

    def _padded(self) -> int:
        """The images with eight channels."""
        return nbytes(self.images) // int(self.images.shape[1]) * PADDED

    def estimate(self, gradient: str) -> int:
        """For the "result", or the gradient of "images" or "weight", in bytes."""
        if gradient == "result":
            return self.forward()
        return self.gradient_of_images() if gradient == "images" else self.gradient_of_weight()

    # -- the three passes -------------------------------------------------------------------------

    def forward(self) -> int:
        """For the result, in bytes."""
        if self.alone:
            return 0
        if self._few:
            return self._forward_of_few()
        if self._as_matrices:
            return 0
        return self._converted()

    def _forward_of_few(self) -> int:
        if not self._half and self.last:
            return nbytes(self.images) + nbytes(self.weight) + SOME_MORE
        if self._whole or (max(self.kernel) < WIDE and not self.last):
            return 0
        if not self._half:
            return self._converted()
        weights = nbytes(self.weight) // int(self.weight.shape[1]) * PADDED
        result = 0 if self.last else nbytes(self.result)
        return self._padded() + weights + result + SOME_MORE

    def gradient_of_images(self) -> int:
        """For the gradient of the images, in bytes."""
        if self.alone or self._as_matrices:
            return 0
        if not self._few:
            return self._converted()
        result = nbytes(self.result)
        if self._half:
            return self._padded() + (0 if self.last else result) + SOME_MORE
        return nbytes(self.images) + nbytes(self.weight) + result if self.last else 0

    def gradient_of_weight(self) -> int:
        """For the gradient of the weight, in bytes."""
        if self.alone:
            return self._weight_of_channels() if self._by_channel else 0
        if self.groups > 1:
            return self._converted()
        if self._few:
            return self._weight_of_few()
        if not self.plain:
            return self._converted() + self._shares()
        return self._sums_of_pixels() if self.last else self._weight_of_pixels()

    def _weight_of_pixels(self) -> int:
        """Sums of single pixels: of each image, or of the whole batch."""
        if not self._aligned:
            return min(self._sums_of_images, self._converted())
        if numel(self.weight) <= SMALL_TILE and self._plane > MANY_PIXELS:
            return self._converted()
        return min(self._sums_of_images, self._converted() + self._shares())

    @property
    def _by_channel(self) -> bool:
        return self.alone and self.last and self._half and len(self.kernel) == 2

    def _weight_of_channels(self) -> int:
        """Each channel for itself."""
        images = int(self.images.shape[0])
        if images < IMAGES_ALONE and self._pixels < PIXELS_ALONE:
            return 0
        channels = div_up(int(self.weight.shape[0]), PADDED_ALONE) * PADDED_ALONE
        return PARTS_OF_CHANNELS * images * channels * math.prod(self.kernel) * FLOAT

    def _weight_of_few(self) -> int:
        result = 0 if self.last else nbytes(self.result)
        if self._half:
            sums = SUMS_OF_WIDE if max(self.kernel) >= WIDE else self._shares()
            return self._padded() + result + sums
        if max(self.kernel) < WIDE_OF_WEIGHTS:
            return 0
        padded = PADDED_OF_WEIGHTS * FLOAT
        images = nbytes(self.images) // int(self.images.shape[1]) // FLOAT * padded
        weight = nbytes(self.weight) // int(self.weight.shape[1]) // FLOAT * padded
        parts = min(self._pixels // PIXELS_OF_FEW, PARTS_OF_FEW)
        return images + nbytes(self.result) + min(parts * weight, SUMS_OF_FEW)

    # -- what cuDNN plans without a device --------------------------------------------------------

    def on_device(self, gradient: str, plan: Plan) -> int:
        """The bytes of a plan where there is an H100, and not only a description of one."""
        if self.alone and len(self.kernel) == 2:
            return self._alone_on_device(gradient, plan)
        transformed = self._transformed(plan) if gradient == "weight" else None
        if transformed is not None:
            return transformed
        tensors = self.images, self.weight, self.result
        return shared_sums.on_all_sms(gradient, *tensors, plan, self.sms)

    def _alone_on_device(self, gradient: str, plan: Plan) -> int:
        """Each channel for itself: cuDNN has engines that it does not plan without a device."""
        kernel, stride = max(self.kernel), max(self.strides)
        common = kernel in COMMON_KERNELS and stride <= 2 and max(self.dilation) == 1
        if gradient != "weight":
            other = plan.engine in NOT_ON_DEVICE[gradient] and (common or gradient == "images")
            return 0 if other else plan.workspace
        if not common or stride > kernel or not self._half or plan.engine == ALONE_IN_16:
            return plan.workspace
        if self.last:
            return self._weight_of_channels()
        single = int(self.weight.shape[0]) == self.groups
        return 0 if plan.engine in NOT_IN_PLANES and single else plan.workspace

    def _transformed(self, plan: Plan) -> int | None:
        """The images, the gradients and the weight, if they are transformed: to the byte as
        measured."""
        if self._half or self.last or self.groups > 1 or len(self.kernel) != 2:
            return None
        side = self.kernel[0]
        if max(*self.strides, *self.dilation) > 1 or self.kernel[1] != side:
            return None
        found = orders.of_kernels(plan.order)
        if found == orders.WINOGRAD and side in WINOGRAD:
            return self._by_winograd()
        if found != orders.FOURIER or self._reach > GREATEST_SIDE:
            return None
        return self._by_fourier()

    def _by_winograd(self) -> int:
        """What Winograd's algorithm takes: all is transformed."""
        pixels, numbers, multiple = WINOGRAD[self.kernel[0]]
        batch, results, *sides = map(int, self.result.shape)
        channels = int(self.images.shape[1])
        tiles = div_up(batch, multiple) * multiple
        tiles *= math.prod(div_up(size, pixels) for size in sides)
        weights = int(self.weight.shape[1]) * results
        return numbers * FLOAT * (tiles * (channels + results) + weights)

    @property
    def _reach(self) -> int:
        """The side of what is transformed as Fourier does."""
        return max(map(int, self.result.shape[2:])) + max(self.kernel) - 1

    def _by_fourier(self) -> int:
        """The same for an FFT: of planes, or of the tiles of larger ones."""
        batch, results, *sides = map(int, self.result.shape)
        channels, tiles, reach = int(self.images.shape[1]), 1, LEAST_SIDE
        if self._reach <= GREATEST_SIDE:
            reach = max(1 << (self._reach - 1).bit_length(), LEAST_SIDE)
        else:
            inner = LEAST_SIDE + 1 - max(self.kernel)
            tiles = math.prod(div_up(size, inner) for size in sides)
        weights = int(self.weight.shape[1]) * results
        planes = max(tiles * batch * (channels + results), weights)
        return 4 * FLOAT * reach * (reach // 2 + 1) * planes + nbytes(self.result)

    # -- what is not known ------------------------------------------------------------------------

    def most(self, gradient: str, cores: bool) -> tuple[int, int]:
        """The most bytes that an algorithm takes, but for an FFT, and with one. They are those that
        an H100 was seen to use on tensor cores, or those that cuDNN's documentation names without
        them (cudnnConvolutionForward, and the same for gradients). The FFT of volumes, whose tiles
        nobody has measured, is not among them."""
        found = [self.estimate(gradient)]
        if cores:
            found.append(self._converted() + (self._shares() if gradient == "weight" else 0))
        elif self.last:
            found.append(nbytes(self.images) + nbytes(self.weight) + nbytes(self.result))
        if cores and gradient == "weight" and self.plain:
            found.append(self._sums_of_images)
        by_fourier = 0
        if self._shifted and (not cores or (gradient == "weight" and not self._half)):
            side = max(self.kernel)
            by_fourier = self._by_fourier() if side <= LEAST_SIDE else 0
            if side in WINOGRAD and self.kernel == (side, side):
                found.append(self._by_winograd())
        return max(found), max(*found, by_fourier)

    @property
    def _shifted(self) -> bool:
        """Whether it can be computed by transforms: each result sees more than a pixel, one beside
        those of the result before it."""
        plane = len(self.kernel) < 3 and max(self.kernel) > 1
        return plane and max(*self.strides, *self.dilation) == 1

    def _shares(self) -> int:
        """The sums of all parts, in whole tiles: one part alone is the result."""
        out = int(self.weight.shape[0]) // self.groups
        sides = [
            (channels, SMALL_CHANNELS if channels <= SMALL_CHANNELS else 2 * SMALL_CHANNELS)
            for channels in (out, int(self.weight.shape[1]))
        ]
        tiles = self.groups * math.prod(self.kernel)
        tiles *= math.prod(div_up(channels, side) for channels, side in sides)
        least = PIXELS_OF_SHARE_IN_16 if self._half else PIXELS_OF_SHARE
        parts = min(self.sms // tiles, self._pixels // least)
        if parts < 2:
            return 0
        tile = math.prod(side for _, side in sides) * FLOAT
        return parts * tiles * (tile + COUNTER) + COUNTERS

    def _sums_of_pixels(self) -> int:
        """The sums of all parts, of single pixels whose channels lie side by side."""
        tiles = math.prod(div_up(int(side), TILE) for side in self.weight.shape[:2])
        waves, least, beside = CUBLAS_IN_16 if self._half else CUBLAS_IN_32
        parts = min(waves * self.sms // tiles, self._pixels // least)
        return parts * numel(self.weight) * FLOAT + beside if parts > 1 else 0
