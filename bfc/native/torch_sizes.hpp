// PyTorch's size arithmetic: what a request is rounded to, and how much is requested from the driver for it.
#pragma once

#include <cstdint>

namespace bfc {

struct TorchSizes {
    static constexpr uint64_t kMinimum = 512;
    static constexpr uint64_t kSmall = uint64_t{1} << 20;               // up to here a request is small
    static constexpr uint64_t kSmallSegment = uint64_t{2} << 20;
    static constexpr uint64_t kOwnSegment = uint64_t{10} << 20;         // from here on a request gets a segment its size
    static constexpr uint64_t kSegmentStep = uint64_t{2} << 20;
    static constexpr int kIntervals = 16;                               // each is a doubling; the first is from 1 MiB

    uint64_t large_segment = uint64_t{20} << 20;
    uint64_t granularity = kMinimum;                                    // a power of two; larger if the device needs it
    uint64_t largest_segment = ~uint64_t{0};                            // the most that the device gives in one call
    bool divides = false;
    uint8_t division_bits[kIntervals] = {};                             // 0: rounded to 512

    uint64_t round(uint64_t size) const {
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

    static bool is_large(uint64_t rounded) { return rounded > kSmall; }

    uint64_t segment_for(uint64_t rounded) const {
        const uint64_t wanted = rounded <= kSmall       ? kSmallSegment
                                : rounded < kOwnSegment ? large_segment
                                                        : up_to(rounded, kSegmentStep);
        if (__builtin_expect(wanted > largest_segment, 0) && rounded <= largest_segment)
            return largest_segment & ~(granularity - 1);
        return wanted;
    }

private:
    // `step` is a power of two. Instead of wrapping around, the result is the largest number, which is always refused.
    static uint64_t up_to(uint64_t size, uint64_t step) {
        return size > ~uint64_t{0} - (step - 1) ? ~uint64_t{0} : (size + step - 1) & ~(step - 1);
    }
};

}  // namespace bfc
