// What `TorchSizes` does: PyTorch's size arithmetic. parts.hpp declares it.
#pragma once

#include <cstdint>

#include "parts.hpp"

namespace bfc {

// `step` is a power of two. Instead of wrapping around, the result is the largest number, which is always refused.
inline uint64_t TorchSizes::up_to(uint64_t size, uint64_t step) {
    return size > ~uint64_t{0} - (step - 1) ? ~uint64_t{0} : (size + step - 1) & ~(step - 1);
}

inline uint64_t TorchSizes::round(uint64_t size) const {
    if (size < kMinimum) return granularity;
    if (__builtin_expect(divides, 0)) {
        const int doubling = 63 - __builtin_clzll(size);
        const int bits = division_bits[doubling < 20 ? 0 : doubling - 20 < kIntervals ? doubling - 20 : kIntervals - 1];
        const uint64_t doubled = uint64_t{1} << doubling, step = doubled >> bits;
        // from 2^55 divisions on upstream's product wraps to 0, and it rounds to a power of two
        if (bits > 0 && size > (kMinimum << bits)) {
            const uint64_t divided = up_to(size, step ? step : doubled);    // not a multiple of 512 if that wraps
            return granularity > kMinimum ? up_to(divided, granularity) : divided;
        }
    }
    return up_to(size, granularity);
}

inline uint64_t TorchSizes::segment_for(uint64_t rounded) const {
    const uint64_t wanted = rounded <= kSmall       ? kSmallSegment
                            : rounded < kOwnSegment ? large_segment
                                                    : up_to(rounded, kSegmentStep);
    if (__builtin_expect(wanted > largest_segment, 0) && rounded <= largest_segment)
        return largest_segment & ~(granularity - 1);
    return wanted;
}

}  // namespace bfc
