"""The kernel that copies item by item, in the language that OpenCL C and CUDA C share.

One text serves both; they differ only in a few macros at its top. There is a kernel for each pair
of dtypes, made from the same body. It walks a shape that has, for each dimension, a stride in bytes
on either side. Conjugation and negation are arguments of the launch.
"""

from __future__ import annotations

from string import Template
from typing import TYPE_CHECKING

from bfc.copying.layout import MAX_DIMS

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

#: What a launch may do in addition to the cast, to the values that were read.
CONJUGATE, NEGATE = 1, 2

#: Names of the dtypes with arithmetic, as NumPy's kind and size.
CODES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
#: The types with which a plain copy moves bytes, by their size.
UNITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}

HEADER = Template("""
#ifdef __OPENCL_VERSION__
#ifdef cl_khr_fp64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif
#define KERNEL kernel
#define GLOBAL global
#define INLINE static inline
#define THREAD ((u4)get_global_id(0))
#define THREADS ((u4)get_global_size(0))
#define BITS_OF_FLOAT(x) as_uint(x)
#define FLOAT_OF_BITS(x) as_float(x)
#define BITS_OF_DOUBLE(x) as_ulong(x)
typedef char i1;
typedef long i8;
typedef ulong u8;
#else
#define KERNEL extern "C" __global__
#define GLOBAL
#define INLINE static __device__ inline
#define THREAD (blockIdx.x * blockDim.x + threadIdx.x)
#define THREADS (gridDim.x * blockDim.x)
#define BITS_OF_FLOAT(x) __float_as_uint(x)
#define FLOAT_OF_BITS(x) __uint_as_float(x)
#define BITS_OF_DOUBLE(x) ((u8)__double_as_longlong(x))
typedef signed char i1;
typedef long long i8;
typedef unsigned long long u8;
#endif
typedef short i2;
typedef int i4;
typedef unsigned char u1;
typedef unsigned short u2;
typedef unsigned int u4;

typedef struct { i8 to[$dims]; i8 source[$dims]; u4 shape[$dims]; } Layout;

INLINE float float_of_half(u2 half_bits)
{
    u4 sign = (u4)(half_bits & 0x8000) << 16, bits = half_bits & 0x7fff;
    if (bits >= 0x7c00)
        return FLOAT_OF_BITS(sign | 0x7f800000 | (bits & 0x3ff) << 13);
    if (bits >= 0x400)
        return FLOAT_OF_BITS(sign | ((bits << 13) + 0x38000000));
    float small = (float)bits * 5.9604644775390625e-08f;
    return sign ? -small : small;
}

/* Rounds to nearest, ties to even. */
INLINE u2 half_of_float(float value)
{
    u4 all = BITS_OF_FLOAT(value), sign = all >> 16 & 0x8000, bits = all & 0x7fffffff;
    if (bits > 0x7f800000) {
        u4 kept = bits >> 13 & 0x3ff;
        return (u2)(sign | 0x7c00 | (kept ? kept : 1));
    }
    if (bits >= 0x47800000)
        return (u2)(sign | 0x7c00);
    if (bits >= 0x38800000)
        return (u2)(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
    if (bits < 0x33000000)
        return (u2)sign;
    u4 shift = 126 - (bits >> 23), digits = (bits & 0x7fffff) | 0x800000;
    u4 kept = digits >> shift, rest = digits & ((1u << shift) - 1), tie = 1u << (shift - 1);
    return (u2)(sign | (kept + (rest > tie || (rest == tie && (kept & 1)))));
}

#if !defined(__OPENCL_VERSION__) || defined(cl_khr_fp64)
INLINE u2 half_of_double(double value)
{
    u8 all = BITS_OF_DOUBLE(value), bits = all & 0x7fffffffffffffff;
    u2 sign = (u2)(all >> 48 & 0x8000);
    if (bits > 0x7ff0000000000000) {
        u2 kept = (u2)(bits >> 42 & 0x3ff);
        return (u2)(sign | 0x7c00 | (kept ? kept : 1));
    }
    if (bits >= 0x40f0000000000000)
        return (u2)(sign | 0x7c00);
    if (bits >= 0x3f10000000000000)
        return (u2)(sign | (bits - 0x3f00000000000000 + 0x1ffffffffff + (bits >> 42 & 1)) >> 42);
    if (bits < 0x3e60000000000000)
        return sign;
    u4 shift = 1051 - (u4)(bits >> 52);
    u8 digits = (bits & 0xfffffffffffff) | 0x10000000000000, one = 1;
    u8 kept = digits >> shift, rest = digits & ((one << shift) - 1), tie = one << (shift - 1);
    return (u2)(sign | (kept + (rest > tie || (rest == tie && (kept & 1)))));
}
#endif
""").substitute(dims=MAX_DIMS)

#: On a CPU each thread copies a run of items. On a GPU neighbouring threads copy neighbouring
#: items.
BODY = Template("""
KERNEL void $name(GLOBAL u1 *to, i8 to_start, GLOBAL const u1 *source, i8 source_start,
                  Layout layout, u4 items, i4 dims, i4 change)
{
#ifdef ONE_AFTER_THE_OTHER
    u4 share = items / THREADS + 1, first = THREAD * share, step = 1;
    u4 last = first < items && share < items - first ? first + share : items;
#else
    u4 first = THREAD, last = items, step = THREADS;
#endif
    to += to_start;
    source += source_start;
    for (u4 item = first; item < last; item += step) {
        u4 left = item;
        GLOBAL u1 *write = to;
        GLOBAL const u1 *read = source;
        for (i4 dim = dims - 1; dim > 0; dim--) {
            u4 outer = left / layout.shape[dim], at = left - outer * layout.shape[dim];
            write += at * layout.to[dim];
            read += at * layout.source[dim];
            left = outer;
        }
        write += left * layout.to[0];
        read += left * layout.source[0];
$convert
    }
}
""")

_NAMES = {"f4": "float", "f8": "double"}
_INDENT = " " * 8


def code_of(dtype: np.dtype) -> str | None:
    """The name of a dtype, if kernels have arithmetic for it, else None."""
    code = f"{dtype.kind}{dtype.itemsize}"
    return code if code in CODES and dtype.isnative else None


def component_size(code: str) -> int:
    """The bytes of an item, or of either half of a complex one."""
    size = int(code[1:])
    return size // 2 if code[0] == "c" else size


def needs_double(*codes: str) -> bool:
    """Whether a kernel between these dtypes computes in double precision."""
    return bool({"f8", "c16"} & set(codes))


def kernel_name(source: str, to: str) -> str:
    return f"copy_{source}_to_{to}"


def text_of(pairs: Iterable[tuple[str, str]]) -> str:
    """The program with a kernel for each (source, destination)."""
    kernels = (
        BODY.substitute(name=kernel_name(source, to), convert=conversion(source, to))
        for source, to in pairs
    )
    return HEADER + "".join(kernels)


def conversion(source: str, to: str) -> str:
    """The lines that make the item at `write` from the one at `read`."""
    return "\n".join(_INDENT + line for line in (*_load(source), *_store(source, to)))


def _component(code: str) -> str:
    """The C type of an item in memory, or of either half of a complex one."""
    if code[0] == "c":
        code = f"f{component_size(code)}"
    if code == "b1":
        return "u1"
    return "u2" if code == "f2" else _NAMES.get(code, code)


def _load(code: str) -> list[str]:
    kind, item = code[0], _component(code)
    place = f"((GLOBAL const {item} *)read)"
    if kind == "b":
        return [f"u1 re = {place}[0] != 0;"]
    if kind in "iu":
        unsigned = f"u{code[1:]}"
        return [
            f"{item} re = {place}[0];",
            f"if (change & {NEGATE})",
            f"    re = ({item})(({unsigned})0 - ({unsigned})re);",
        ]
    if code == "f2":
        lines = [f"float re = float_of_half({place}[0]);"]
    else:
        lines = [f"{item} re = {place}[0];"]
    if kind == "c":
        lines += [f"{item} im = {place}[1];", f"if (change & {CONJUGATE})", "    im = -im;"]
    lines += [f"if (change & {NEGATE})", "    re = -re;"]
    return [*lines, f"if (change & {NEGATE})", "    im = -im;"] if kind == "c" else lines


def _store(source: str, to: str) -> list[str]:
    kind, item = to[0], _component(to)
    place = f"((GLOBAL {item} *)write)"
    if kind == "b":
        also = " || im != 0" if source[0] == "c" else ""
        return [f"{place}[0] = re != 0{also};"]
    if to == "f2":
        wide = needs_double(source)
        return [f"{place}[0] = half_of_{'double(re)' if wide else 'float((float)re)'};"]
    lines = [f"{place}[0] = ({item})re;"]
    if kind == "c":
        lines.append(f"{place}[1] = {f'({item})im' if source[0] == 'c' else 0};")
    return lines
