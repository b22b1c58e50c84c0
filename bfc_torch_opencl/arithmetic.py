"""Kernels that compute with float32, in the language that OpenCL C and CUDA C share: itemwise
operations, sums, and matrix products. And the dimensions that they walk.

Sums are added up in double precision. If a device has none, the error of each step is added up in
addition to the sum (Kahan, Babuska; Ogita, Rump and Oishi for products), which is as accurate.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import Template

from bfc.copying.kernels import HEADER
from bfc.copying.layout import MAX_DIMS

#: The results for two items `x` and `y`. A fused operation rounds once, as PyTorch does on a CPU.
OPERATIONS = {
    "add": "x + y",
    "subtract": "x - y",
    "add_scaled": "FUSED(x, y, scale)",
    "multiply": "x * y",
    "divide": "DIVIDED(x, y)",
    "clamp": "x < y ? y : x",  # a NaN stays, and so does -0.0
    "keep": "x",
}

#: How many columns one thread of a CPU computes together.
COLUMNS = 8

PRELUDE = Template("""
#ifdef __OPENCL_VERSION__
#pragma OPENCL FP_CONTRACT OFF
#define ROUNDED_PRODUCT(x, y) ((x) * (y))
#else
#define ROUNDED_PRODUCT(x, y) __fmul_rn(x, y)
#endif

#ifdef ONE_AFTER_THE_OTHER
#define FIRST(items) (THREAD * SHARE(items))
#define LAST(items) (FIRST(items) < (items) && SHARE(items) < (items) - FIRST(items) \\
                     ? FIRST(items) + SHARE(items) : (items))
#define SHARE(items) ((items) / THREADS + 1)
#define STEP 1
#define COLUMNS $columns
#else
#define FIRST(items) THREAD
#define LAST(items) (items)
#define STEP THREADS
#define COLUMNS 1
#endif

#if (!defined(__OPENCL_VERSION__) || defined(cl_khr_fp64)) && !defined(IN_SINGLE)
/* The quotient of two floats, rounded to a double and then to a float, is rounded correctly. */
#define DIVIDED(x, y) ((float)((double)(x) / (double)(y)))
#ifdef ONE_AFTER_THE_OTHER
/* A compiler that does not know the processor computes fma without its instruction, tenfold slower.
   In double precision the product is exact, and the last digit differs once in 2**29 times. */
#define FUSED(x, y, scale) ((float)((double)(y) * (double)(scale) + (double)(x)))
#else
#define FUSED(x, y, scale) fma(y, scale, x)
#endif
typedef double Sum;
INLINE Sum nothing(void) { return 0; }
INLINE Sum plus(Sum sum, float x) { return sum + x; }
INLINE Sum plus_product(Sum sum, float x, float y) { return sum + (double)x * (double)y; }
INLINE Sum plus_sum(Sum sum, Sum other) { return sum + other; }
INLINE float rounded(Sum sum) { return (float)sum; }
#else
#define DIVIDED(x, y) ((x) / (y))
#define FUSED(x, y, scale) fma(y, scale, x)
typedef struct { float sum, lost; } Sum;
INLINE Sum nothing(void) { Sum sum; sum.sum = sum.lost = 0; return sum; }
INLINE Sum plus(Sum sum, float x)
{
    float all = sum.sum + x, added = all - sum.sum;
    sum.lost += (sum.sum - (all - added)) + (x - added);
    sum.sum = all;
    return sum;
}
INLINE Sum plus_product(Sum sum, float x, float y)
{
    float product = ROUNDED_PRODUCT(x, y);
    sum = plus(sum, product);
    sum.lost += fma(x, y, -product);
    return sum;
}
INLINE Sum plus_sum(Sum sum, Sum other)
{
    sum = plus(sum, other.sum);
    sum.lost += other.lost;
    return sum;
}
/* Beside a sum that is infinite, what was lost is no number. */
INLINE float rounded(Sum sum)
{
    float all = sum.sum + sum.lost;
    return all - all == 0 ? all : sum.sum;
}
#endif

typedef struct { i8 out, a, b; u4 items, values; float x, y, scale; } Run;
typedef struct {
    i8 out[$dims], a[$dims], b[$dims];
    u4 shape[$dims];
    i4 dims;
} Strides;
typedef struct {
    i8 out_start, a_start;
    i8 out[$dims], a[$dims], over[$dims];
    u4 shape[$dims], over_shape[$dims];
    u4 outputs, inputs, parts;
    i4 dims, over_dims;
} Reduction;
typedef struct {
    i8 out, a, b;
    i8 out_row, out_column, a_row, a_column, b_row, b_column;
    u4 rows, columns, inner;
} Product;
""")

#: `values` says which of x and y are arguments of the launch, and not items. A kernel with strides
#: walks a shape. One without strides is for items that are contiguous on all sides.
ITEMWISE = Template("""
KERNEL void ${name}_run(GLOBAL float *out, GLOBAL const float *a, GLOBAL const float *b, Run run)
{
    float scale = run.scale;
    u4 last = LAST(run.items);
    out += run.out;
    a += run.a;
    b += run.b;
    for (u4 item = FIRST(run.items); item < last; item += STEP) {
        float x = run.values & 1 ? run.x : a[item], y = run.values & 2 ? run.y : b[item];
        out[item] = $result;
    }
}

KERNEL void ${name}_strided(GLOBAL float *out, GLOBAL const float *a, GLOBAL const float *b,
                            Run run, Strides strides)
{
    float scale = run.scale;
    u4 last = LAST(run.items);
    for (u4 item = FIRST(run.items); item < last; item += STEP) {
        u4 left = item;
        i8 to = run.out, first = run.a, second = run.b;
        for (i4 dim = strides.dims - 1; dim >= 0; dim--) {
            u4 outer = left / strides.shape[dim], at = left - outer * strides.shape[dim];
            to += at * strides.out[dim];
            first += at * strides.a[dim];
            second += at * strides.b[dim];
            left = outer;
        }
        float x = run.values & 1 ? run.x : a[first], y = run.values & 2 ? run.y : b[second];
        out[to] = $result;
    }
}
""")

#: Each thread adds up a part of the items for one item of the result. `sum_of_parts` adds the
#: parts.
SUM = """
INLINE i8 place_of_output(const Reduction *way, u4 output, GLOBAL const float **a)
{
    i8 place = way->out_start;
    for (i4 dim = way->dims - 1; dim >= 0; dim--) {
        u4 outer = output / way->shape[dim], at = output - outer * way->shape[dim];
        place += at * way->out[dim];
        *a += at * way->a[dim];
        output = outer;
    }
    return place;
}

KERNEL void sum(GLOBAL float *out, GLOBAL const float *a, GLOBAL Sum *parts, Reduction way)
{
    u4 items = way.outputs * way.parts, last = LAST(items);
    u4 share = (way.inputs + way.parts - 1) / way.parts;
    i4 inner = way.over_dims - 1;
    for (u4 item = FIRST(items); item < last; item += STEP) {
        GLOBAL const float *start = a + way.a_start;
        i8 place = place_of_output(&way, item / way.parts, &start);
        u4 at = item % way.parts * share;
        u4 end = at < way.inputs && share < way.inputs - at ? at + share : way.inputs;
        Sum total = nothing();
        while (at < end) {
            u4 left = at / way.over_shape[inner], first = at - left * way.over_shape[inner];
            u4 count = way.over_shape[inner] - first < end - at ? way.over_shape[inner] - first
                                                                : end - at;
            i8 step = way.over[inner];
            GLOBAL const float *read = start + first * step;
            for (i4 dim = inner - 1; dim >= 0; dim--) {
                u4 outer = left / way.over_shape[dim];
                read += (left - outer * way.over_shape[dim]) * way.over[dim];
                left = outer;
            }
            for (u4 i = 0; i < count; i++)
                total = plus(total, read[i * step]);
            at += count;
        }
        if (way.parts == 1)
            out[place] = rounded(total);
        else
            parts[item] = total;
    }
}

KERNEL void sum_of_parts(GLOBAL float *out, GLOBAL const Sum *parts, Reduction way)
{
    u4 last = LAST(way.outputs);
    for (u4 item = FIRST(way.outputs); item < last; item += STEP) {
        GLOBAL const float *none = out;
        Sum total = nothing();
        for (u4 part = 0; part < way.parts; part++)
            total = plus_sum(total, parts[item * way.parts + part]);
        out[place_of_output(&way, item, &none)] = rounded(total);
    }
}
"""

PRODUCT = """
KERNEL void product(GLOBAL float *out, GLOBAL const float *a, GLOBAL const float *b, Product way)
{
    u4 blocks = (way.columns + COLUMNS - 1) / COLUMNS;
    u4 items = way.rows * blocks, last = LAST(items);
    for (u4 item = FIRST(items); item < last; item += STEP) {
        u4 row = item / blocks, column = (item - row * blocks) * COLUMNS;
        u4 width = way.columns - column < COLUMNS ? way.columns - column : COLUMNS;
        GLOBAL const float *left = a + way.a + row * way.a_row;
        GLOBAL const float *right = b + way.b + column * way.b_column;
        GLOBAL float *to = out + way.out + row * way.out_row + column * way.out_column;
        Sum totals[COLUMNS];
        for (u4 i = 0; i < COLUMNS; i++)
            totals[i] = nothing();
        for (u4 k = 0; k < way.inner; k++) {
            float x = left[k * way.a_column];
            GLOBAL const float *read = right + k * way.b_row;
            if (width == COLUMNS)
                for (u4 i = 0; i < COLUMNS; i++)
                    totals[i] = plus_product(totals[i], x, read[i * way.b_column]);
            else
                for (u4 i = 0; i < width; i++)
                    totals[i] = plus_product(totals[i], x, read[i * way.b_column]);
        }
        for (u4 i = 0; i < width; i++)
            to[i * way.out_column] = rounded(totals[i]);
    }
}
"""


def text_of(*, in_single: bool = False) -> str:
    """The program with all kernels. With `in_single` it does not use double precision, even if the
    device has it."""
    kernels = (ITEMWISE.substitute(name=name, result=text) for name, text in OPERATIONS.items())
    first = "#define IN_SINGLE\n" if in_single else ""
    prelude = PRELUDE.substitute(dims=MAX_DIMS, columns=COLUMNS)
    return first + HEADER + prelude + "".join(kernels) + SUM + PRODUCT


def joined(shape: Sequence[int], *sides: Sequence[int]) -> list[tuple[int, ...]]:
    """The fewest dimensions that reach every item of several sides at once, the outermost first:
    the number of steps, and the stride on each side. No stride is negative.

    >>> joined((2, 3), (3, 1), (3, 1), (0, 1))
    [(2, 3, 3, 0), (3, 1, 1, 1)]
    >>> joined((2, 3), (3, 1), (3, 1))
    [(6, 1, 1)]
    """
    dims = [dim for dim in zip(shape, *sides, strict=True) if dim[0] != 1]
    dims.sort(key=lambda dim: dim[1:], reverse=True)
    found: list[tuple[int, ...]] = []
    for dim in dims:
        outer = found[-1] if found else ()
        if outer and all(outer[i] == dim[0] * dim[i] for i in range(1, len(dim))):
            found[-1] = outer[0] * dim[0], *dim[1:]
        else:
            found.append(dim)
    return found


def are_apart(dims: Sequence[tuple[int, ...]]) -> bool:
    """Whether no two items of the first side of `joined` share a place. Also False if that cannot
    be told easily.

    >>> are_apart([(2, 3), (3, 1)]), are_apart([(2, 2), (3, 1)])
    (True, False)
    """
    reach = 1
    for dim in reversed(dims):
        steps, stride = dim[:2]
        if stride < reach:
            return False
        reach += (steps - 1) * stride
    return True
