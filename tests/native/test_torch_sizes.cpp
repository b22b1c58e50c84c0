// The arithmetic of bfc/native/torch_sizes.hpp for the sizes of a file. Run by test_torch_sizes.py.
//
// A line of standard input is "large BYTES", "bits INTERVAL BITS" or a size, for which it prints the block and the
// segment.

#include <cstdint>
#include <iostream>
#include <string>

#include "torch_sizes.hpp"

int main() {
    bfc::TorchSizes sizes;
    std::string word;
    while (std::cin >> word) {
        if (word == "large") {
            std::cin >> sizes.large_segment;
        } else if (word == "bits") {
            unsigned interval, bits;
            std::cin >> interval >> bits;
            if (interval >= bfc::TorchSizes::kIntervals) return 1;
            sizes.division_bits[interval] = static_cast<uint8_t>(bits);
            sizes.divides = false;
            for (const uint8_t held : sizes.division_bits) sizes.divides |= held > 0;
        } else {
            const uint64_t rounded = sizes.round(std::stoull(word));
            std::cout << rounded << ' ' << sizes.segment_for(rounded) << '\n';
        }
    }
}
