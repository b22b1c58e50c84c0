// The books of a sub-allocator that maps memory: its reservations, its pages, and where they are mapped. They map
// nothing themselves: they say what may be done, and record what was done. The caller holds a lock. Each change is made
// completely, or, if the host has no memory for it, not at all.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace bfc {

// A piece of memory. It lives until it is released and mapped nowhere.
struct MappedPage {
    uint64_t number;
    uint64_t nbytes;
    uint64_t mappings = 0;
    bool is_held = true;

    MappedPage(uint64_t number, uint64_t nbytes) : number(number), nbytes(nbytes) {}
    bool is_gone() const { return !is_held && mappings == 0; }
};

// A page at an address.
struct Mapping {
    uint64_t start;
    std::shared_ptr<MappedPage> page;
    bool has_access = false;    // whether the device may use it

    uint64_t end() const { return start + page->nbytes; }
};

struct Reservation {
    uint64_t start;
    uint64_t nbytes;
    std::vector<Mapping> mappings;      // in the order of addresses

    std::vector<Mapping>::iterator at(uint64_t address) {
        return std::lower_bound(mappings.begin(), mappings.end(), address,
                                [](const Mapping& one, uint64_t wanted) { return one.start < wanted; });
    }
};

// Mappings that lie end to end in one reservation: there, to be made, or removed.
struct MappingRun {
    uint64_t reservation = 0;   // its first address
    std::vector<Mapping> mappings;

    uint64_t start() const { return mappings.empty() ? 0 : mappings.front().start; }
    uint64_t nbytes() const { return mappings.empty() ? 0 : mappings.back().end() - start(); }

    void drop_first(size_t count) { mappings.erase(mappings.begin(), mappings.begin() + count); }

    // Those of its pages that are gone once the run is unmapped.
    std::vector<std::shared_ptr<MappedPage>> leaving() const {
        std::vector<std::shared_ptr<MappedPage>> found;
        for (const Mapping& each : mappings) {
            const auto is_same = [&](const Mapping& other) { return other.page == each.page; };
            if (!each.page->is_held && std::find(found.begin(), found.end(), each.page) == found.end() &&
                static_cast<uint64_t>(std::count_if(mappings.begin(), mappings.end(), is_same)) == each.page->mappings)
                found.push_back(each.page);
        }
        return found;
    }
};

// Why something may not be done. They are negative: no driver answers with such a number.
enum MappingRefusal : int {
    kMayBeDone = 0,
    kNoMemoryForBooks = -100,
    kOddSize,           // no positive multiple of the granularity
    kNoReservation,     // not a whole one
    kStillMapped,       // a reservation in which something is mapped: the first at `where`
    kUnknownPage,       // `where` is its number
    kNoPages,
    kNotReserved,
    kOddAddress,
    kPastEnd,           // of the reservation, which is `where`
    kMappedAlready,     // a page is mapped at `where`
    kNoRun,             // not whole pages that are mapped end to end
};

class MappingBooks {
public:
    using Pages = std::map<uint64_t, std::shared_ptr<MappedPage>>;
    using Reservations = std::map<uint64_t, Reservation>;

    uint64_t granularity = 1;
    uint64_t page_bytes = 0;        // of all pages that are not released, or still mapped
    uint64_t where = 0;             // what the last refusal was about
    Pages pages;                    // those that are not released, by number
    Reservations reservations;      // by first address

    bool is_size(uint64_t nbytes) const { return nbytes > 0 && nbytes % granularity == 0; }

    // -- addresses

    int reserved(uint64_t address, uint64_t nbytes) noexcept {
        return done([&] { reservations[address] = Reservation{address, nbytes, {}}; });
    }
    int may_unreserve(uint64_t address, uint64_t nbytes) noexcept {
        const auto found = reservations.find(address);
        if (found == reservations.end() || found->second.nbytes != nbytes) return kNoReservation;
        if (found->second.mappings.empty()) return kMayBeDone;
        return refuse(kStillMapped, found->second.mappings.front().start);
    }
    // Takes a reservation out, so that its addresses may be reserved anew; `put_back` undoes it, and cannot fail.
    void take_reservation(uint64_t address, Reservations::node_type& taken) noexcept {
        taken = reservations.extract(address);
    }
    void put_back(Reservations::node_type& taken) noexcept { reservations.insert(std::move(taken)); }

    Reservation* find(uint64_t address) noexcept {
        auto behind = reservations.upper_bound(address);
        if (behind == reservations.begin()) return nullptr;
        Reservation* found = &(--behind)->second;
        return address - found->start < found->nbytes ? found : nullptr;
    }

    // -- pages

    int created(uint64_t number, uint64_t nbytes) noexcept {
        const int result = done([&] { pages[number] = std::make_shared<MappedPage>(number, nbytes); });
        if (result == kMayBeDone) page_bytes += nbytes;
        return result;
    }
    std::shared_ptr<MappedPage> held(uint64_t number) noexcept {
        const auto found = pages.find(number);
        if (found != pages.end()) return found->second;
        where = number;
        return nullptr;
    }
    // A page, which may still be mapped, belongs to nobody any more; `hold_again` undoes it, and cannot fail.
    void take_page(uint64_t number, Pages::node_type& taken) noexcept {
        taken = pages.extract(number);
        if (taken.empty()) return;
        MappedPage& page = *taken.mapped();
        page.is_held = false;
        if (page.mappings == 0) page_bytes -= page.nbytes;
    }
    void hold_again(Pages::node_type& taken) noexcept {
        if (taken.empty()) return;
        MappedPage& page = *taken.mapped();
        if (page.is_gone()) page_bytes += page.nbytes;
        page.is_held = true;
        pages.insert(std::move(taken));
    }

    // -- mappings

    // What `map` is asked for. Nothing changes.
    int plan_map(uint64_t address, const uint64_t* numbers, size_t count, MappingRun* run) noexcept {
        run->mappings.clear();
        if (count == 0) return kNoPages;
        const int result = done([&] { run->mappings.reserve(count); });
        if (result != kMayBeDone) return result;
        uint64_t at = address;
        for (size_t i = 0; i < count; ++i) {
            std::shared_ptr<MappedPage> page = held(numbers[i]);
            if (page == nullptr) return kUnknownPage;
            const uint64_t nbytes = page->nbytes;
            run->mappings.push_back(Mapping{at, std::move(page)});
            at += nbytes;
        }
        Reservation* there = find(address);
        if (there == nullptr) return kNotReserved;
        run->reservation = there->start;
        if ((address - there->start) % granularity) return kOddAddress;
        if (at > there->start + there->nbytes) return refuse(kPastEnd, there->start + there->nbytes);
        return may_map(*there, address, at);
    }
    // Enters what `plan_map` has returned: the first `count` mappings.
    int mapped(const MappingRun& run, size_t count) noexcept {
        const auto found = reservations.find(run.reservation);
        if (found == reservations.end() || count == 0) return kMayBeDone;
        Reservation& there = found->second;
        const int result = done([&] {
            there.mappings.insert(there.at(run.start()), run.mappings.begin(), run.mappings.begin() + count);
        });
        if (result != kMayBeDone) return result;
        for (size_t i = 0; i < count; ++i) {
            MappedPage& page = *run.mappings[i].page;
            if (page.is_gone()) page_bytes += page.nbytes;
            ++page.mappings;
        }
        return result;
    }
    // The mappings that begin at an address and have `nbytes` bytes. Nothing changes.
    int find_run(uint64_t address, uint64_t nbytes, MappingRun* run) noexcept {
        Reservation* there = find(address);
        run->mappings.clear();
        if (there == nullptr || nbytes == 0) return kNoRun;
        const auto first = there->at(address);
        auto last = first;
        uint64_t at = address;
        for (; at < address + nbytes && last != there->mappings.end() && last->start == at; ++last) at = last->end();
        if (at != address + nbytes) return kNoRun;
        run->reservation = there->start;
        return done([&] { run->mappings.assign(first, last); });
    }
    // Removes mappings. Those of their pages that are released are gone then, unless they are mapped elsewhere.
    void unmapped(const MappingRun& run) noexcept {
        const auto found = reservations.find(run.reservation);
        if (found == reservations.end() || run.mappings.empty()) return;
        const auto first = found->second.at(run.start());
        found->second.mappings.erase(first, first + run.mappings.size());
        for (const Mapping& each : run.mappings) {
            --each.page->mappings;
            if (each.page->is_gone()) page_bytes -= each.page->nbytes;
        }
    }
    // Notes that the device may use a run; `put_access_back` undoes it.
    void accessible(const MappingRun& run) noexcept { put_access(run, true); }
    void put_access_back(const MappingRun& run) noexcept { put_access(run, false); }

private:
    template <class Change>
    static int done(Change change) noexcept {
        try {
            change();
            return kMayBeDone;
        } catch (...) {
            return kNoMemoryForBooks;
        }
    }
    int refuse(MappingRefusal why, uint64_t about) noexcept {
        where = about;
        return why;
    }
    // Whether nothing is mapped between two addresses of a reservation.
    int may_map(Reservation& there, uint64_t address, uint64_t end) noexcept {
        const auto next = there.at(address);
        if (next != there.mappings.end() && next->start < end) return refuse(kMappedAlready, next->start);
        if (next == there.mappings.begin() || std::prev(next)->end() <= address) return kMayBeDone;
        return refuse(kMappedAlready, std::prev(next)->start);
    }
    void put_access(const MappingRun& run, bool given) noexcept {
        const auto found = reservations.find(run.reservation);
        if (found == reservations.end() || run.mappings.empty()) return;
        auto at = found->second.at(run.start());
        for (const Mapping& each : run.mappings) {
            if (at == found->second.mappings.end()) return;
            (at++)->has_access = given || each.has_access;
        }
    }
};

}  // namespace bfc
