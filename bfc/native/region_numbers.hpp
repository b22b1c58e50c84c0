// The numbers of regions, which rise from each to the next one that came.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace bfc {

// Numbers the regions of a map from 0 on, in the order that they have. False: the host is out of memory, and nothing has
// changed.
template <class Map>
bool number_again(Map& regions) noexcept {
    std::vector<typename Map::mapped_type*> ordered;
    try {
        ordered.reserve(regions.size());
    } catch (...) {
        return false;
    }
    for (auto& entry : regions) ordered.push_back(&entry.second);
    std::sort(ordered.begin(), ordered.end(),
              [](const auto* one, const auto* other) { return one->number < other->number; });
    for (uint32_t number = 0; number < ordered.size(); ++number) ordered[number]->number = number;
    return true;
}

}  // namespace bfc
