// Which places of a plan are taken, which request is for which of them, and room for guests: blocks that have no place,
// or whose place is taken. It knows offsets only. The constructor and `add_sequence` may throw std::bad_alloc.
//
// The borders of all places cut the span into cells, and each cell has a bit: whether a place that covers it is taken.
// A place covers whole cells, so that one is free if its bits are 0, in whatever order blocks come and go. Guests lie
// where nothing lives; they are few, and kept in a list by offset.
//
// Where memory is mapped page by page, each region is cut into pages, too, and each page has a bit: whether it is away,
// that is, not mapped, or lent to a request that found no gap. A place on such a page is as good as taken.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "forward.hpp"
#include "plan_matcher.hpp"
#include "torch_sizes.hpp"

namespace bfc {

class PlanServer {
public:
    static constexpr int64_t kNone = -1;
    static constexpr uint32_t kNoStream = ~uint32_t{0};
    static constexpr uint64_t kFarthest = 2;        // a length is at most so many times the longest so far, or recorded
    static constexpr uint64_t kSmall = 1 << 20;     // what the policy holds cheaply beside a plan
    static constexpr uint64_t kDisplaced = 4;       // a guest displaces no place of so many times its size, where sizes are foretold
    static constexpr size_t kMostWanted = 16384;    // requests that are still to come, for which a guest makes room
    // What `turn` says about a request where no kind of step begins with it.
    static constexpr int64_t kGoesOn = -1, kEnds = -2, kWasNone = -3;
    // A step that began by itself was none if after so many requests fewer than a quarter of them were as planned, or
    // after so many fewer than half. Then no step begins for a while, and after so many such steps in a row none at all.
    static constexpr uint64_t kSoon = 16, kLate = 64, kMostMistaken = 4;
    static constexpr uint64_t kMissing = 8;         // a program makes all of the plan's head but for this part of the bytes
    static constexpr int64_t kHead = 4;             // a step begins with one of its first requests

    struct Guest {
        uint64_t offset, size;
        uint32_t handle;
    };
    struct PageRun {                    // consecutive pages of a region
        int region;
        uint32_t first, count;
    };
    struct Area {                       // what one stream may use of one region
        uint64_t begin, end;
        uint32_t stream;
    };
    struct Growth {                     // the raw bytes of a place: `constant` + `linear` x + `square` x * x
        int64_t constant, linear, square;
        uint32_t follows;               // which of the lengths of its kind x is
    };
    struct Counts {                     // since the plan came into use
        uint64_t hits, hit_bytes, guests, guest_bytes, side, side_bytes, moved;
    };

    uint32_t first_record = 0;          // the record of place 0; those of the others follow
    uint64_t address[2] = {0, 0};       // of the two regions: what is never freed, and all else
    bool present[2] = {false, false};
    Counts counts{};
    uint64_t departures = 0;            // requests of this step that did not get a place
    uint64_t departed_at = 0;           // of the first of them: how many requests there were before it, its size, and
    uint64_t departed_size = 0;         // the place that it should have had, or kNone; and the next allocation's id
    int64_t departed_place = kNone, departed_id = 0;
    std::vector<uint32_t> bin_sets;     // by stream; then, where there are pages, those of the two regions
    size_t alive = 0;                   // places and guests in use
    std::vector<uint64_t> missed;       // by length of its kind: what told one for which there is no room, in bytes
    uint64_t peak = 0;                  // the most that was live in the recording, all streams together
    uint64_t passed = 0;                // bytes that streams have taken of each other in this step
    uint64_t apart = 0;                 // bytes beyond `peak` that they may have, so that they need not take them
    bool in_step = false;
    bool begins_with_head = false;      // it came into use where nothing lived
    bool is_proven = false;             // the program has made the head, or that is not to be expected
    bool is_waiting = false;            // all is served as if there were no plan: it had no memory at the last miss

    // `streams` are the numbers of the plan's streams. Stream 0 of the plan is that which is called `home` here.
    PlanServer(const uint64_t* offsets, const uint64_t* sizes, size_t places, uint64_t base, uint64_t span,
               const std::vector<uint64_t>& streams, uint64_t home)
        : bin_sets(streams.size(), 0), base_(base), span_(span), home_(home), numbers_(streams),
          handles_(streams.size(), 0), is_bound_(streams.size(), 0), heads_(streams.size(), kNone),
          active_(streams.size(), nullptr), paused_(streams.size(), nullptr) {
        cells_.reserve(2 * places + 3);
        cells_.assign({0, base, span});
        for (size_t i = 0; i < places; ++i) {
            cells_.push_back(offsets[i]);
            cells_.push_back(offsets[i] + sizes[i]);
        }
        std::sort(cells_.begin(), cells_.end());
        cells_.erase(std::unique(cells_.begin(), cells_.end()), cells_.end());
        places_.resize(places);
        for (size_t i = 0; i < places; ++i)
            places_[i] = place_at(offsets[i], sizes[i]);
        taken_.assign(cells_.size() / 64 + 1 + kMasks, 0);    // flip() looks at words behind the last one
        wanted_.assign(taken_.size(), 0);
        set(taken_, 0, cell_at(span));
    }

    void add_area(Area area) { areas_.push_back(area); }
    // Lets all sizes follow from lengths; there is one growth for each place, and which length of its kind it is of.
    void set_growths(const int64_t* numbers, const uint32_t* follows) {
        growths_.resize(places_.size());
        for (size_t i = 0; i < places_.size(); ++i)
            growths_[i] = {numbers[3 * i], numbers[3 * i + 1], numbers[3 * i + 2], follows[i]};
    }
    // The requests of a stream in a part of a run: the places they are for, and before which of them each dies. `once`,
    // by place: whether a block there outlives all iterations.
    size_t add_sequence(uint32_t stream, const uint32_t* places, const uint32_t* ends, size_t count,
                        const uint8_t* once) {
        std::vector<uint64_t> sizes(count);
        for (size_t i = 0; i < count; ++i) sizes[i] = places_[places[i]].size;
        sequences_.emplace_back(stream, places, ends, sizes.data(), count);
        for (uint32_t i = 0; i < count; ++i) {
            if (!once[places[i]]) continue;
            places_[places[i]].sequence = static_cast<uint32_t>(sequences_.size() - 1);
            places_[places[i]].request = i;
            sequences_.back().has_once = true;
        }
        return sequences_.size() - 1;
    }
    // This sequence is what its stream asks for before the first step.
    void set_head(size_t sequence) noexcept { heads_[sequences_[sequence].stream] = static_cast<int64_t>(sequence); }

    // The iterations of these sequences have lengths from now on: add_length() adds each.
    void begin_lengths(const uint32_t* sequences, size_t count) {
        for (size_t i = 0; i < count; ++i) sequences_[sequences[i]].lengths = static_cast<int64_t>(lengths_.size());
    }
    // Notes which places of each sequence follow from which length, once all lengths are added.
    void end_lengths() {
        for (Sequence& each : sequences_) {
            if (each.lengths == kNone) continue;
            for (uint32_t i = 0; i < each.places.size(); ++i) {
                const Growth& growth = growths_[each.places[i]];
                if (growth.linear == 0 && growth.square == 0) continue;
                if (growth.follows >= each.following.size()) each.following.resize(growth.follows + 1);
                each.following[growth.follows].push_back(i);
            }
        }
    }
    // Another kind of step, which asks for these sequences, and the number of the kind that always comes after it, or kNone.
    void add_kind(const std::vector<uint32_t>& sequences, int64_t follower) {
        kinds_.push_back(sequences);
        followers_.push_back(follower);
        size_t requests = 0;
        for (uint32_t sequence : sequences) requests += sequences_[sequence].places.size();
        longest_ = std::max(longest_, requests);
        lengths_of_kinds_.push_back(requests);
        by_requests_.push_back(followers_.size() - 1);
        std::stable_sort(by_requests_.begin(), by_requests_.end(),
                         [this](size_t a, size_t b) { return lengths_of_kinds_[a] > lengths_of_kinds_[b]; });
    }
    // The request of number `request` tells the next of them: it is x times `unit` bytes. The places are for x up to
    // `longest`, and x up to `recorded` was recorded. `is_clear`: nothing lives in the region of the bodies when it comes,
    // if all is as planned.
    void add_length(uint32_t sequence, uint32_t request, uint64_t unit, uint64_t longest, uint64_t recorded, bool is_clear) {
        Sequence& its = sequences_[sequence];
        its.keys.push_back({request, static_cast<uint32_t>(lengths_.size() - static_cast<size_t>(its.lengths)), is_clear});
        lengths_.push_back({unit, longest, std::max(longest, recorded), 0});
        if (missed.size() <= its.keys.back().number) missed.resize(its.keys.back().number + 1, 0);
    }

    // Cuts the regions into pages of so many bytes, as an exponent of two. All of them are away. Once, before any region
    // is present.
    void set_pages(int shift) {
        page_shift_ = shift;
        bin_sets.resize(numbers_.size() + 2, 0);
        for (int region = 0; region < 2; ++region) {
            away_[region].assign(pages(region) / 64 + 1, 0);
            lendable_[region].assign(away_[region].size(), 0);
            set(away_[region], 0, pages(region));
        }
        obstacles_ = guests_.size() + pages(0) + pages(1);
    }
    bool has_pages() const noexcept { return page_shift_ != 0; }
    uint32_t pages(int region) const noexcept {
        return has_pages() ? static_cast<uint32_t>((region_size(region) + page_size() - 1) >> page_shift_) : 0;
    }

    size_t places() const noexcept { return places_.size(); }
    uint64_t region_size(int region) const noexcept { return region ? span_ - base_ : base_; }
    int region_of(uint64_t offset) const noexcept { return offset >= base_; }
    int region_at(uint64_t ptr) const noexcept { return !(present[0] && ptr - address[0] < base_); }
    uint64_t address_of(uint64_t offset) const noexcept {
        const int region = region_of(offset);
        return address[region] + (region ? offset - base_ : offset);
    }
    bool contains(uint64_t ptr) const noexcept {
        return (present[0] && ptr - address[0] < base_) || (present[1] && ptr - address[1] < span_ - base_);
    }
    bool is_place(uint32_t handle) const noexcept { return handle - first_record < places_.size(); }
    uint64_t offset_of(int64_t place) const noexcept { return places_[place].offset; }
    uint64_t size_of(int64_t place) const noexcept { return places_[place].size; }

    // Which of the plan's streams a stream stands for. kNoStream: none, or it has not been bound yet.
    uint32_t stream_of(uint64_t handle) noexcept {
        handle = named(handle);
        if (last_stream_ < handles_.size() && handles_[last_stream_] == handle) return last_stream_;
        for (uint32_t i = 0; i < handles_.size(); ++i)
            if (is_bound_[i] && handles_[i] == handle) return last_stream_ = i;
        return kNoStream;
    }

    // Lets a stream stand for the plan's stream of that number, or else for the first that no other stands for. Stream 0
    // stands for none but stream 0. kNoStream: none is left.
    uint32_t bind_stream(uint64_t handle) noexcept {
        handle = named(handle);
        uint32_t chosen = kNoStream;
        for (uint32_t i = 0; i < handles_.size(); ++i) {
            if (is_bound_[i]) continue;
            if (numbers_[i] == handle) {
                chosen = i;
                break;
            }
            if (chosen == kNoStream && numbers_[i] != 0 && handle != 0) chosen = i;
        }
        if (chosen == kNoStream) return kNoStream;
        handles_[chosen] = handle;
        is_bound_[chosen] = 1;
        return last_stream_ = chosen;
    }

    // A region has come, or goes. Nothing may live in it.
    void set_region(int region, bool is_present, uint64_t at) noexcept {
        const uint64_t begin = region ? base_ : 0, end = region ? span_ : base_;
        present[region] = is_present;
        address[region] = at;
        if (is_present)
            clear(taken_, cell_at(begin), cell_at(end));
        else
            set(taken_, cell_at(begin), cell_at(end));
        if (!is_present && has_pages()) {
            set(away_[region], 0, pages(region));
            count_obstacles();
        }
    }
    // A step has ended, which came as planned or not. Streams that take memory of each other wait for each other: where
    // they do so in step after step, they may have memory of their own in place of what they took.
    void note_passed(bool as_planned) noexcept {
        constexpr uint32_t kSettled = 4;        // the first steps after a change pass memory once
        if (!as_planned || passed + passed_before_ == 0) passing_steps_ = 0;
        if (as_planned && passed > 0 && ++passing_steps_ > kSettled) apart += passed;
        passed_before_ = passed;
        passed = 0;
    }
    size_t streams() const noexcept { return numbers_.size(); }
    bool is_bound(uint32_t stream) const noexcept { return is_bound_[stream]; }
    // The stream that stands for one of the plan's.
    uint64_t handle_of(uint32_t stream) const noexcept { return named(handles_[stream]); }
    // The streams that stand for those of the plan. May throw std::bad_alloc.
    std::vector<uint64_t> bound() const {
        std::vector<uint64_t> found;
        for (size_t i = 0; i < handles_.size(); ++i)
            if (is_bound_[i]) found.push_back(named(handles_[i]));
        return found;
    }

    // Whether nothing lives in a region.
    bool is_empty(int region) const noexcept {
        if (!present[region]) return true;
        const uint64_t begin = region ? base_ : 0, end = region ? span_ : base_;
        const size_t next = guest_from(begin);
        return !any(taken_, cell_at(begin), cell_at(end)) && (next == guests_.size() || guests_[next].offset >= end);
    }

    // The region of the place that `take` would look at for a request, if that region is absent, or -1.
    int absent_for(uint32_t stream, uint64_t size) noexcept {
        Sequence* now = active_[stream];
        const int64_t found = now && !(present[0] && present[1]) ? now->matcher.find(size) : kNone;
        if (found < 0) return -1;
        const int region = region_of(places_[now->places[found]].offset);
        return present[region] ? -1 : region;
    }

    // Whether most of what is made before the first step, and outlives all steps, was asked for. It may lie elsewhere,
    // where another thread's guest was in its place.
    bool has_whole_head() const noexcept {
        uint64_t all = 0, there = 0;
        for (const int64_t number : heads_) {
            if (number == kNone) continue;
            const Sequence& head = sequences_[number];
            for (size_t i = 0; i < head.places.size(); ++i) {
                const Place& place = places_[head.places[i]];
                if (place.sequence != static_cast<uint32_t>(number)) continue;
                all += place.size;
                if (head.matcher.is_served(i)) there += place.size;
            }
        }
        return there >= all - all / kMissing;
    }

    // -- steps --------------------------------------------------------------------------------------------------------

    void end() noexcept {
        std::fill(active_.begin(), active_.end(), nullptr);
        std::fill(paused_.begin(), paused_.end(), nullptr);
        is_paused_ = false;
        asking_ = nullptr;
    }
    void begin(size_t sequence) noexcept {
        Sequence* begun = &sequences_[sequence];
        begun->matcher.restart();
        begun->ended = kNotEnded;
        begun->last_ended = 0;
        for (size_t i = 0; begun->has_once && i < begun->places.size(); ++i)    // what lives already is not asked for
            if (places_[begun->places[i]].sequence == sequence && lives(begun->places[i])) begun->matcher.leave_out(i);
        begun->told = 0;
        begun->is_read = begun->has_told = begun->is_behind = false;
        begun->missed = 0;
        active_[begun->stream] = begun;
    }

    // Whether a block of a sequence has been freed since that began which was to outlive all iterations.
    bool has_ended(size_t sequence) const noexcept { return sequences_[sequence].ended != kNotEnded; }

    // Outside of steps: from the next request on, a stream's requests are again those of the head, if something of the
    // head has been freed. The program makes a new model. In the midst of asking for the head it does so only if this
    // request is found nowhere else, and is one of those that it would go back to: the model before was not finished.
    void resume_head(uint32_t stream, uint64_t size) noexcept {
        if (in_step || heads_[stream] == kNone) return;
        Sequence& head = sequences_[heads_[stream]];
        if (head.ended == kNotEnded) return;
        const auto dies = [&](int64_t i) { return places_[head.places[i]].sequence == kNoSequence; };
        const int64_t all = static_cast<int64_t>(head.places.size()), ended = head.ended;
        int64_t first = ended, end = int64_t{head.last_ended} + 1;      // and what stands around these, and dies
        while (first > 0 && ended - first < PlanMatcher::kBehind && dies(first - 1)) --first;
        while (end < all && end - head.last_ended <= PlanMatcher::kBehind && dies(end)) ++end;
        if (alive == 0) {
            head.matcher.restart();
        } else {
            if (active_[stream] && head.matcher.expected() >= 0
                && (head.matcher.find(size) >= 0 || !head.matcher.has(size, first, ended + 1))) return;
            head.matcher.go_back(first, end, [&](size_t i) { return lives(head.places[i]); });
        }
        head.ended = kNotEnded;
        head.last_ended = 0;
        active_[stream] = &head;
    }

    // -- steps that begin by themselves -------------------------------------------------------------------------------
    //
    // Where a program marks no steps, one begins with a request that is one of the first of a kind, and that nothing asks
    // for in what is served now, if that has come to its end, or hardly anything lives: an exception has ended it, or it
    // was shorter. What follows shows whether it was one.

    // What a request says, which is not as planned: the kind whose step it begins, or that the step goes on, that it has
    // ended, or that it was none.
    int64_t turn(uint32_t stream, uint64_t size, uint64_t requested) noexcept {
        if (in_step && is_on_trial_) {
            const uint64_t came = asked() - asked_before_, found = counts.hits - found_before_;
            if ((came >= kSoon && 4 * found < came) || (came >= kLate && 2 * found < came)) return kWasNone;
            if (came >= kLate) settle();
        }
        const bool may_be_head = is_paused_ && is_of_ended_head(stream, size);
        if (is_paused_) active_.swap(paused_);
        is_paused_ = false;
        Sequence* now = active_[stream];
        if (may_be_head && !(now && now->matcher.comes_next(size))) return kEnds;
        if (now && (now->matcher.find(size) >= 0 || tells_now(*now, requested))) return kGoesOn;
        const int64_t kind = asked() < not_before_ || is_in_head() ? kNone : kind_beginning(stream, size, requested);
        if (kind != kNone && (count_left().first == 0 || live_in_body() <= low_ + region_size(1) / kLow)) return kind;
        const bool ends = in_step && is_over() && (has_head_ended() || ++extra_ > static_cast<uint64_t>(PlanMatcher::kBehind));
        return ends ? kEnds : kGoesOn;
    }
    // Before a step of a kind begins by itself.
    void note_begun(int64_t kind) noexcept {
        from_head_ = !in_step && std::any_of(active_.begin(), active_.end(), [](const Sequence* each) { return each; });
        kind_ = kind;
        is_own_ = is_on_trial_ = true;
        asked_before_ = asked();
        found_before_ = counts.hits;
        low_ = live_in_body();
        extra_ = 0;
    }
    // A step that began by itself has ended. Returns whether it was one.
    bool note_ended() noexcept {
        const uint64_t came = asked() - asked_before_, found = counts.hits - found_before_;
        const bool was_one = 2 * found >= came;
        outside_ = asked();
        is_own_ = false;
        if (was_one) {
            expected_ = followers_[kind_];
            settle();
            return true;
        }
        const uint64_t rest = kSoon << std::min<uint64_t>(mistaken_++, kMostMistaken);
        not_before_ = asked() + std::min<uint64_t>(rest, std::max<uint64_t>(kSoon, longest_ / 2));
        for (size_t i = 0; from_head_ && i < heads_.size(); ++i)    // what was served before goes on
            if (heads_[i] != kNone) active_[i] = &sequences_[heads_[i]];
        return false;
    }
    // Whether most of the requests of the open step have come: an evaluation may begin as an iteration does.
    bool is_mostly_over() const noexcept {
        const auto [left, all] = count_left();
        return 4 * left <= all;
    }
    // Whether so many requests have come since the last step that the memory of an iteration has been idle for long; or
    // so many that the iterations will not come.
    bool is_idle_for_long() noexcept {
        if (in_step || asked() - outside_ <= longest_) return false;
        outside_ = asked();
        return true;
    }
    bool is_in_vain() const noexcept {
        const bool fits = 2 * counts.hits >= asked() || (settled_ > 0 && mistaken_ < kMostMistaken);
        const uint64_t long_enough = (guests_.empty() && is_empty(1) ? 2 : 8) * longest_;   // what it holds is to go back
        return !in_step && !fits && asked() - settled_ > long_enough;
    }

    // -- lengths ------------------------------------------------------------------------------------------------------

    // The length that a request tells, or 0: it tells none, or that for which the sizes are already.
    uint64_t length_of(uint32_t stream, uint64_t requested) noexcept {
        Sequence* now = active_[stream];
        if (!now || now->has_told) return 0;    // several ask for one request; its successor may tell another length
        while (now->asks() && now->matcher.is_past(now->key().request)) now->tell();
        if (!now->asks()) return 0;
        const uint64_t before = length_before(*now, requested);
        if (before) return before;
        if (!now->matcher.comes_now(now->key().request)) return 0;
        now->is_read = true;
        const Length& known = length(*now);
        if (!is_length(known, requested)) return 0;
        const uint64_t told = requested / known.unit;
        if (told != known.now) return told;
        now->tell();
        now->has_told = true;
        return 0;
    }
    // The bytes that tell a length.
    uint64_t bytes_of(uint32_t stream, uint64_t told) const noexcept { return told * length(*active_[stream]).unit; }
    // Whether a request that tells a length is still to come at which room can be made.
    bool asks() const noexcept {
        for (const Sequence* each : active_)
            for (size_t i = each ? each->told : 0; each && i < each->keys.size(); ++i)
                if (each->keys[i].is_clear) return true;
        return false;
    }
    // Whether the places of the step's kind are too small for a length that the next request tells, and room can be made.
    bool is_too_long(uint32_t stream, uint64_t told) const noexcept {
        return active_[stream]->key().is_clear && told > length(*active_[stream]).longest;
    }
    uint32_t number_of_length(uint32_t stream) const noexcept { return active_[stream]->key().number; }
    // From now on the step's requests have the sizes of a length that the next request tells, rounded as PyTorch does, or
    // else (null) to a granularity.
    void set_length(uint32_t stream, uint64_t told, const TorchSizes* torch, uint64_t granularity) noexcept {
        Sequence& now = *active_[stream];
        const uint32_t number = now.key().number;
        Length& its = length(now);
        its.now = told;
        if (told > its.longest) missed[number] = std::max(missed[number], told * its.unit);
        for (Sequence& each : sequences_) {
            if (each.lengths != now.lengths || number >= each.following.size()) continue;
            for (uint32_t i : each.following[number]) {
                const uint64_t raw = raw_size(each.places[i], told);
                each.matcher.resize(
                    i, raw == 0 ? 0 : torch ? torch->round(raw) : (raw + granularity - 1) / granularity * granularity);
            }
        }
        if (now.is_behind) now.matcher.pass(now.key().request);
        now.is_behind = false;
        now.tell();
        now.has_told = true;
    }
    // The bytes that a place is asked for at a length, before rounding. 0: it is not asked for at that length.
    uint64_t raw_size(size_t place, uint64_t told) const noexcept {
        const Growth& growth = growths_[place];
        const __int128 x = static_cast<__int128>(told);
        const __int128 raw = growth.constant + growth.linear * x + growth.square * x * x;
        return raw < 1 ? 0 : raw > (__int128{1} << 60) ? uint64_t{1} << 60 : static_cast<uint64_t>(raw);
    }

    // Takes the places, areas and sequences of another plan with as many of each, whose first region is the same. The
    // second region must be absent. `live` are the places of the first region that are in use.
    void take_over(PlanServer& other, const std::vector<uint32_t>& live) noexcept {
        for (size_t i = 0; i < sequences_.size(); ++i) {
            other.sequences_[i].matcher.go_on_as(sequences_[i].matcher);
            other.sequences_[i].told = sequences_[i].told;
            other.sequences_[i].is_read = sequences_[i].is_read;
            other.sequences_[i].has_told = sequences_[i].has_told;
            other.sequences_[i].is_behind = sequences_[i].is_behind;
            other.sequences_[i].missed = sequences_[i].missed;
            other.sequences_[i].ended = sequences_[i].ended;
            other.sequences_[i].last_ended = sequences_[i].last_ended;
        }
        for (Sequence*& now : active_)
            if (now) now = &other.sequences_[now - sequences_.data()];
        std::swap(cells_, other.cells_);
        std::swap(places_, other.places_);
        std::swap(taken_, other.taken_);
        std::swap(wanted_, other.wanted_);
        std::swap(areas_, other.areas_);
        std::swap(sequences_, other.sequences_);
        for (size_t i = 0; i < lengths_.size(); ++i) other.lengths_[i].now = lengths_[i].now;
        std::swap(lengths_, other.lengths_);
        std::swap(growths_, other.growths_);
        std::swap(span_, other.span_);
        std::swap(peak, other.peak);
        std::swap(away_[1], other.away_[1]);        // all of them, in both
        std::swap(lendable_[1], other.lendable_[1]);
        count_obstacles();
        asking_ = nullptr;
        if (present[0]) clear(taken_, 0, cell_at(base_));
        for (uint32_t place : live) set(taken_, places_[place].first, places_[place].end);
    }

    // -- places -------------------------------------------------------------------------------------------------------

    // The place of a request, taken, if the request comes as planned or nearly so, and the place is free. Else kNone,
    // and nothing has changed.
    int64_t take(uint32_t stream, uint64_t size) noexcept {
        Sequence* now = active_[stream];
        if (!now) return kNone;
        if (now->asks() && __builtin_expect(!now->has_told && now->matcher.comes_now(now->key().request), 0)) {
            // the slow path reads the length that it tells: several may have one size when that is rounded
            if (!now->is_read || !length(*now).now || now->matcher.size_of(now->key().request) != size) return kNone;
            now->tell();
        }
        const int64_t found = now->matcher.find(size);
        if (found < 0) return kNone;
        const int64_t place = now->places[found];
        if (!occupy(place, size)) return kNone;
        now->matcher.take(found, size);
        now->has_told = now->is_read = false;
        now->missed = 0;
        return place;
    }

    // The same for a request that `take` found no place for: one that fills at least half of the expected place gets
    // that. If it has none after all, `find_room` knows how long it is expected to live.
    int64_t take_late(uint32_t stream, uint64_t size, uint64_t requested) noexcept {
        Sequence* now = active_[stream];
        asking_ = now;
        horizon_ = now ? now->places.size() : 0;
        except_ = kNone;
        if (!now) return kNone;
        const int64_t expected = now->matcher.expected();
        // whose place is not for a smaller one
        const bool asks = now->asks() && now->matcher.comes_now(now->key().request);
        const bool fits = expected >= 0 && size <= now->matcher.size_of(expected)
                          && (!has_pages() || now->matcher.size_of(expected) - size < page_size());
        const int64_t found = now->matcher.match(size, !asks && fits);
        now->has_told = now->is_read = false;
        now->missed = found < 0 ? requested : 0;
        const int64_t asked = found >= 0 ? found : expected;
        if (found >= 0) {
            const int64_t place = now->places[found];
            if (occupy(place, size)) return place;
            horizon_ = now->ends[found];
            ++counts.moved;
        } else if (expected >= 0) {
            except_ = expected;
            horizon_ = now->ends[expected];
        }
        if (departures++ == 0) {
            departed_at = counts.hits + counts.guests + counts.side;
            departed_size = size;
            departed_place = asked >= 0 ? now->places[asked] : kNone;
        }
        return kNone;
    }

    void release(int64_t place) noexcept {
        const Place& freed = places_[place];
        flip(freed);
        --alive;
        if (__builtin_expect(freed.sequence != kNoSequence, 0)) {
            Sequence& its = sequences_[freed.sequence];
            its.ended = std::min(its.ended, freed.request);
            its.last_ended = std::max(its.last_ended, freed.request);
            if (is_own_ && !is_paused_ && heads_[its.stream] == freed.sequence) {
                active_.swap(paused_);      // `turn` is asked at the next request
                is_paused_ = true;
            }
        }
    }

    // -- pages --------------------------------------------------------------------------------------------------------

    // Pages go away, or come back. Nothing may live there.
    void send_away(int region, uint32_t first, uint32_t count) noexcept {
        set(away_[region], first, first + count);
        obstacles_ += count;
    }
    void bring_back(int region, uint32_t first, uint32_t count) noexcept {
        clear(away_[region], first, first + count);
        obstacles_ -= count;
    }
    bool is_away(int region, uint32_t page) const noexcept { return away_[region][page >> 6] >> (page & 63) & 1; }

    // Whether pages are there, and nothing lives in them.
    bool are_idle(int region, uint32_t first, uint32_t count) const noexcept {
        if (any(away_[region], first, first + count)) return false;
        const uint64_t begin = start_of(region) + (uint64_t{first} << page_shift_);
        const uint64_t end = std::min(begin + (uint64_t{count} << page_shift_), end_of(region));
        const size_t guest = guest_from(begin);
        return begin >= end || (!any(taken_, cell_around(begin), cell_at(end))
                                && (guest == guests_.size() || guests_[guest].offset >= end));
    }

    // The first page of the row of pages around this one that are there.
    uint32_t row_begin(int region, uint32_t page) const noexcept {
        while (page > 0) {
            const uint32_t before = page - 1;
            const uint64_t word = away_[region][before >> 6] & (~uint64_t{0} >> (63 - (before & 63)));
            if (word) return (before & ~uint32_t{63}) + 64 - static_cast<uint32_t>(__builtin_clzll(word));
            page = before & ~uint32_t{63};
        }
        return 0;
    }

    // Of how many of these pages, from the first on, it is the same whether they are wholly a stream's own; and whether
    // they are.
    uint32_t alike_from(uint32_t stream, PageRun run, bool& is_own) const noexcept {
        is_own = is_own_page(stream, run.region, run.first);
        uint32_t count = 1;
        while (count < run.count && is_own_page(stream, run.region, run.first + count) == is_own) ++count;
        return count;
    }

    // The pages of the place that `take` would look at for a request. `count` is 0 if there is none.
    PageRun pages_for(uint32_t stream, uint64_t size) noexcept {
        Sequence* now = active_[stream];
        const int64_t found = now && has_pages() ? now->matcher.find(size) : kNone;
        if (found < 0) return {0, 0, 0};
        const Place& place = places_[now->places[found]];
        const uint32_t first = page_of(place.offset);
        return {region_of(place.offset), first, last_page(place.offset, place.size) + 1 - first};
    }
    // The first row of them that are away.
    PageRun away_for(uint32_t stream, uint64_t size) noexcept {
        PageRun run = pages_for(stream, size);
        const uint32_t end = run.first + run.count;
        run.first = next(away_[run.region], run.first, end, true);
        run.count = next(away_[run.region], run.first, end, false) - run.first;
        return run;
    }

    // The stream that alone may use a page, or kNoStream.
    uint32_t owner_of(int region, uint32_t page) const noexcept {
        for (uint32_t stream = 0; stream < streams(); ++stream)
            if (is_own_page(stream, region, page)) return stream;
        return kNoStream;
    }

    // How many pages a stream may use for something else: those that are wholly its own and idle.
    size_t count_lendable(uint32_t stream) noexcept {
        for (auto& bits : lendable_) std::fill(bits.begin(), bits.end(), 0);
        if (!has_pages()) return 0;
        for (const Area& area : areas_)
            if (area.stream == stream) mark_idle(area);
        size_t count = 0;
        for (int region = 0; region < 2; ++region)
            for (size_t word = 0; word < lendable_[region].size(); ++word) {
                lendable_[region][word] &= ~away_[region][word];
                count += static_cast<size_t>(__builtin_popcountll(lendable_[region][word]));
            }
        return count;
    }

    // Chooses idle pages of a stream for the request that `take_late` was asked for last: those that no request needs in
    // its expected life, or else last, in the longest rows. `for_long`: its life is not known, and the iteration may come
    // again. Appends them to `runs`, and returns how many they are: none where the host is out of memory.
    size_t choose(uint32_t stream, size_t wanted, bool for_long, std::vector<PageRun>& runs) noexcept {
        size_t count = count_lendable(stream);
        Sequence* now = active_[stream];
        const size_t all = now ? now->places.size() : 0;
        const bool lasts = for_long || asking_ != now;
        const size_t open = now ? now->matcher.first_open() : 0;
        const size_t end = lasts ? open + all : std::min(all, horizon_);
        for (size_t at = open; at < end && count > wanted; ++at) {
            const size_t i = at < all ? at : at - all;      // behind the last one: of the next such iteration
            if (at < all && (now->matcher.is_served(i) || (asking_ == now && static_cast<int64_t>(i) == except_))) continue;
            const Place& place = places_[now->places[i]];
            std::vector<uint64_t>& bits = lendable_[region_of(place.offset)];
            each_word(page_of(place.offset), last_page(place.offset, place.size) + 1, [&](uint32_t word, uint64_t mask) {
                for (uint64_t found = bits[word] & mask; found && count > wanted; found &= found - 1, --count)
                    bits[word] &= ~(found & -found);
            });
        }
        try {
            std::vector<PageRun> rows;
            for (int region = 0; region < 2; ++region)
                for (uint32_t page = 0, stop; (page = next(lendable_[region], page, pages(region), true)) < pages(region);
                     page = stop) {
                    stop = next(lendable_[region], page, pages(region), false);
                    rows.push_back({region, page, stop - page});
                }
            std::stable_sort(rows.begin(), rows.end(), [](PageRun a, PageRun b) { return a.count > b.count; });
            size_t chosen = 0;
            for (PageRun row : rows) {
                if (chosen == wanted) break;
                row.count = static_cast<uint32_t>(std::min<size_t>(row.count, wanted - chosen));
                runs.push_back(row);
                chosen += row.count;
            }
            return chosen;
        } catch (...) {
            runs.clear();
            return 0;
        }
    }

    // -- guests -------------------------------------------------------------------------------------------------------

    bool reserve_guest() noexcept {
        try {
            guests_.reserve(guests_.size() + 1);
            return true;
        } catch (...) {
            return false;
        }
    }

    // Room for the request that `take_late` was asked for last, or kNone: the smallest gap that no place needs which is
    // still to be asked for in the block's expected life, or else the smallest gap. None for what is small while there is
    // less room than in the recording: more is made only where nothing lives, and what lives for long is mostly small.
    int64_t find_room(uint32_t stream, uint64_t size) noexcept {
        if (size <= kSmall && is_short()) return kNone;
        wanted_ = taken_;           // of the same length: nothing is allocated
        const size_t open = asking_ ? asking_->matcher.first_open() : 0;
        if (asking_)
            for (size_t i = open; i < std::min({asking_->places.size(), horizon_, open + kMostWanted}); ++i)
                if (static_cast<int64_t>(i) != except_ && !asking_->matcher.is_served(i))
                    set(wanted_, places_[asking_->places[i]].first, places_[asking_->places[i]].end);
        int64_t found = smallest_gap(wanted_, stream, size);
        if (found >= 0) return found;
        found = any_room(stream, size);
        const bool is_foretold = asking_ && asking_->lengths != kNone && !has_pages();
        return found >= 0 && is_foretold && displaced(found, size) > kDisplaced * size ? kNone : found;
    }
    bool is_short() const noexcept {
        return std::any_of(lengths_.begin(), lengths_.end(), [](const Length& its) { return its.longest < its.farthest; });
    }
    // Of the places that `find_room` left free for what is still to be asked for, the largest that a guest would lie in.
    uint64_t displaced(int64_t offset, uint64_t size) noexcept {
        const uint64_t begin = static_cast<uint64_t>(offset);
        const size_t open = asking_->matcher.first_open();
        uint64_t largest = 0;
        for (size_t i = open; i < std::min({asking_->places.size(), horizon_, open + kMostWanted}); ++i) {
            const Place& place = places_[asking_->places[i]];
            const uint64_t asked = asking_->matcher.size_of(static_cast<int64_t>(i));   // too much in a longer step, perhaps
            const bool is_wanted = !asking_->matcher.is_served(i) && asked <= place.size;
            if (is_wanted && place.offset < begin + size && begin < place.offset + place.size)
                largest = std::max(largest, asked);
        }
        return largest;
    }
    int64_t any_room(uint32_t stream, uint64_t size) const noexcept { return smallest_gap(taken_, stream, size); }

    // Needs a reserve_guest() before it.
    void add_guest(uint64_t offset, uint64_t size, uint32_t handle) noexcept {
        guests_.insert(guests_.begin() + static_cast<ptrdiff_t>(guest_from(offset)), Guest{offset, size, handle});
        ++alive;
        ++obstacles_;
        ++counts.guests;
        counts.guest_bytes += size;
    }
    void remove_guest(uint32_t handle) noexcept {
        guests_.erase(std::find_if(guests_.begin(), guests_.end(), [=](const Guest& g) { return g.handle == handle; }));
        --alive;
        --obstacles_;
    }
    const std::vector<Guest>& guests() const noexcept { return guests_; }

    // -- what can be seen ---------------------------------------------------------------------------------------------

    // Whether exactly these places are taken, no two of them overlap, and no guest overlaps one or lies outside. True
    // where the host has no memory to find out.
    bool is_sound(const std::vector<uint32_t>& live) const noexcept {
        std::vector<uint64_t> bits;
        try {
            bits.assign(taken_.size(), 0);
        } catch (...) {
            return true;
        }
        for (int region = 0; region < 2; ++region)
            if (!present[region]) set(bits, cell_at(region ? base_ : 0), cell_at(region ? span_ : base_));
        for (uint32_t place : live) {
            if (any(bits, places_[place].first, places_[place].end)) return false;
            set(bits, places_[place].first, places_[place].end);
            if (is_partly_away(places_[place].offset, places_[place].size)) return false;
        }
        uint64_t end = 0;
        for (const Guest& guest : guests_) {
            const uint64_t high = guest.offset + guest.size;
            if (guest.offset < end || high > span_ || (guest.offset < base_ && high > base_)) return false;
            if (any(bits, cell_around(guest.offset), cell_at(high))) return false;
            if (is_partly_away(guest.offset, guest.size)) return false;
            end = high;
        }
        return bits == taken_ && alive == live.size() + guests_.size();
    }
    size_t bytes() const noexcept {
        size_t total = places_.capacity() * sizeof(Place) + (cells_.capacity() + 2 * taken_.capacity()) * 8;
        for (const Sequence& each : sequences_) total += each.places.size() * (8 + 13);
        for (int region = 0; region < 2; ++region) total += 2 * away_[region].capacity() * 8;
        return total;
    }

private:
    static constexpr int kMasks = 4;
    static constexpr uint32_t kNoSequence = ~uint32_t{0}, kNotEnded = ~uint32_t{0};
    struct alignas(64) Place {          // one cache line
        uint64_t offset, size;
        uint64_t mask[kMasks] = {};     // its cells in the first word that has some, and in those behind that
        uint32_t first, end;            // its cells
        uint32_t sequence = kNoSequence, request = 0;   // of a block that outlives all iterations: which one it is
    };
    struct Key {                        // a request that tells a length, and which of the lengths of its kind
        uint32_t request, number;
        bool is_clear;                  // whether nothing lives in the region of the bodies then
    };
    struct Sequence {
        uint32_t stream;
        std::vector<uint32_t> places, ends;
        PlanMatcher matcher;
        int64_t lengths = kNone;        // the first length of its kind, or kNone: its sizes are always the same
        std::vector<Key> keys;          // its requests that tell lengths, in their order
        size_t told = 0;                // how many of them have come, or were left out
        bool is_read = false;           // whether it was looked for a length in the request that is served now
        bool has_told = false;          // whether that has told one
        bool is_behind = false;         // whether that was told by the request before it
        uint64_t missed = 0;            // the bytes of the request before, if that was not as planned
        std::vector<std::vector<uint32_t>> following;   // by length: the requests whose size follows from it
        bool has_once = false;          // whether some of its blocks outlive all iterations
        uint32_t ended = kNotEnded, last_ended = 0;     // the first and the last request whose block has been freed
        Sequence(uint32_t on, const uint32_t* p, const uint32_t* e, const uint64_t* sizes, size_t count)
            : stream(on), places(p, p + count), ends(e, e + count), matcher(sizes, count) {}
        bool asks() const noexcept { return told < keys.size(); }
        const Key& key() const noexcept { return keys[told]; }      // the next one
        bool key_at(size_t request) const noexcept { return told + 1 < keys.size() && keys[told + 1].request == request; }
        void tell() noexcept {
            ++told;
            is_read = false;
        }
    };

    struct Length {                     // in units: for which there is room, or was in the recording; for which the sizes are
        uint64_t unit, longest, farthest, now;
    };

    uint64_t base_, span_, home_;
    std::vector<uint64_t> numbers_, handles_;   // of the streams: in the plan, and in the program
    std::vector<uint8_t> is_bound_;
    uint32_t last_stream_ = kNoStream;
    std::vector<uint64_t> cells_;       // where each begins; the last is the end of the span
    std::vector<Place> places_;
    std::vector<uint64_t> taken_, wanted_;
    std::vector<Area> areas_;
    std::vector<Sequence> sequences_;
    std::vector<Length> lengths_;       // of all kinds
    std::vector<Growth> growths_;       // by place; empty if no kind has lengths
    std::vector<int64_t> heads_;        // by stream: the number of the head's sequence, or kNone
    std::vector<Sequence*> active_;     // by stream: the sequence that is served now, or null
    std::vector<Guest> guests_;         // by offset
    int page_shift_ = 0;                // 0: there are no pages
    std::vector<uint64_t> away_[2];     // by region: a bit for each page
    std::vector<uint64_t> lendable_[2]; // the same; for `choose`
    size_t obstacles_ = 0;              // guests, and pages that are away
    uint64_t passed_before_ = 0;        // `passed`, of the step before
    uint32_t passing_steps_ = 0;        // the last steps in which streams took memory of each other: of two steps, one did
    // Of steps that begin by themselves; the first two are counts of requests when the last one began.
    uint64_t asked_before_ = 0, found_before_ = 0;
    uint64_t low_ = 0;                  // what lived in the bodies' region then
    uint64_t not_before_ = 0;           // no step begins before so many requests
    uint64_t settled_ = 0;              // how many there were when the last step was seen to be one
    uint64_t outside_ = 0;              // and when the last one ended, or what was idle went back
    uint64_t mistaken_ = 0;             // in a row: steps that were none
    uint64_t extra_ = 0;                // requests behind the end of the step
    int64_t kind_ = 0;                  // of the last step
    int64_t expected_ = kNone;          // the kind that comes next, as far as is known
    bool is_own_ = false, is_on_trial_ = false, from_head_ = false;     // of the step that is open
    bool is_paused_ = false;            // something of the head has been freed in such a step: the next request tells more
    std::vector<Sequence*> paused_;     // what was active then
    std::vector<std::vector<uint32_t>> kinds_;  // the sequences of each kind's steps but the first
    std::vector<int64_t> followers_;    // by kind
    std::vector<size_t> lengths_of_kinds_, by_requests_;    // by kind, its requests; the kinds, those with the most first
    size_t longest_ = 0;                // the requests of the longest
    Sequence* asking_ = nullptr;        // of the last request that had no place
    size_t horizon_ = 0;
    int64_t except_ = kNone;

    // The length that the next request of a sequence tells which tells one.
    Length& length(const Sequence& its) noexcept { return lengths_[static_cast<size_t>(its.lengths) + its.key().number]; }
    const Length& length(const Sequence& its) const noexcept {
        return lengths_[static_cast<size_t>(its.lengths) + its.key().number];
    }

    bool is_length(const Length& its, uint64_t requested, uint64_t most = kFarthest) const noexcept {
        return requested % its.unit == 0 && requested / its.unit - 1 < most * its.farthest;
    }
    // The length that the request before this one told after all, or 0: one that stands before it was left out, and this
    // one is what comes behind it at that length, and not what would tell one itself.
    uint64_t length_before(Sequence& its, uint64_t requested) noexcept {
        const size_t key = its.key().request, next = key + 1;
        its.is_behind = false;
        if (its.missed == 0 || next >= its.places.size() || its.key_at(next)) return 0;
        const Length& known = length(its);
        const int64_t away = static_cast<int64_t>(key) - its.matcher.expected();
        if (away < 0 || away > kHead || its.matcher.is_served(next) || !is_length(known, its.missed)) return 0;
        const Growth& growth = growths_[its.places[next]];
        const bool follows = growth.follows == its.key().number && (growth.linear != 0 || growth.square != 0);
        if (!follows || raw_size(its.places[next], its.missed / known.unit) != requested) return 0;
        its.is_behind = true;
        return its.missed / known.unit;
    }

    // -- steps that begin by themselves
    static constexpr uint64_t kLow = 64;        // hardly anything: this part of the region more than when the last step began
    uint64_t asked() const noexcept { return counts.hits + counts.guests + counts.side; }
    void settle() noexcept {
        is_on_trial_ = false;
        mistaken_ = 0;
        settled_ = asked();
    }
    // Whether a request tells the length that a sequence asks for next.
    bool tells_now(Sequence& its, uint64_t requested) noexcept {
        return its.asks() && its.matcher.comes_now(its.key().request) && is_length(length(its), requested);
    }
    // Whether nearly all that is served now has been asked for.
    bool is_over() const noexcept {
        const auto [left, all] = count_left();
        return left <= std::min(PlanMatcher::kBehind, all / 8);
    }
    std::pair<int64_t, int64_t> count_left() const noexcept {
        int64_t left = 0, all = 0;
        for (const Sequence* each : active_)
            if (each) {
                left += each->matcher.left();
                all += each->matcher.slots();
            }
        return {left, all};
    }
    // Whether fewer requests have come than the plan has before the first step: none begins by itself then.
    bool is_in_head() const noexcept {
        uint64_t all = 0;
        for (const int64_t number : heads_) all += number == kNone ? 0 : sequences_[number].places.size();
        return !is_proven && asked() < all;
    }
    // Whether a request is one of those of the head whose blocks have been freed.
    bool is_of_ended_head(uint32_t stream, uint64_t size) const noexcept {
        if (heads_[stream] == kNone || !has_ended(static_cast<size_t>(heads_[stream]))) return false;
        const Sequence& head = sequences_[heads_[stream]];
        return head.matcher.has(size, head.ended, int64_t{head.last_ended} + 1);
    }
    // Whether something of the head has been freed: the program may make another model.
    bool has_head_ended() const noexcept {
        return std::any_of(heads_.begin(), heads_.end(), [&](int64_t i) { return i != kNone && has_ended(i); });
    }
    // The bytes that live in the region of the bodies.
    uint64_t live_in_body() const noexcept {
        uint64_t total = 0;
        if (!present[1]) return 0;
        const uint32_t end = cell_at(span_);
        for (uint32_t cell = cell_at(base_); cell < end && (cell = next(taken_, cell, end, true)) < end;) {
            const uint32_t stop = next(taken_, cell, end, false);
            total += cells_[stop] - cells_[cell];
            cell = stop;
        }
        for (const Guest& guest : guests_) total += guest.offset >= base_ ? guest.size : 0;
        return total;
    }
    // The kind of which a request is one of the first, or kNone: the one that always comes after the last before others,
    // then one that has room for the length that this tells, then the one with the most requests: its places serve the
    // beginning of a shorter one, such as an evaluation, whose blocks die sooner. After a mistake another comes first.
    int64_t kind_beginning(uint32_t stream, uint64_t size, uint64_t requested) const noexcept {
        const int64_t all = static_cast<int64_t>(kinds_.size());
        const int64_t expected = is_own_ ? followers_[kind_] : expected_;
        for (int64_t at = 0; expected != kNone && at < kHead; ++at)
            if (begins(expected, stream, at, size, requested, kFarthest)) return expected;
        for (int64_t at = 0; at < kHead; ++at)
            for (const uint64_t most : {uint64_t{1}, kFarthest})
                for (int64_t turn = 0; turn < all; ++turn) {
                    const int64_t kind = static_cast<int64_t>(by_requests_[(static_cast<int64_t>(mistaken_) + turn) % all]);
                    if (begins(kind, stream, at, size, requested, most)) return kind;
                }
        return kNone;
    }
    bool begins(int64_t kind, uint32_t stream, int64_t at, uint64_t size, uint64_t requested,
                uint64_t most) const noexcept {
        for (uint32_t sequence : kinds_[kind])
            if (sequences_[sequence].stream == stream
                && begins(sequences_[sequence], first_of(kind), at, size, requested, most)) return true;
        return false;
    }
    uint32_t first_of(int64_t kind) const noexcept {
        uint32_t first = ~uint32_t{0};
        for (uint32_t sequence : kinds_[kind]) first = std::min(first, sequences_[sequence].places[0]);
        return first;
    }
    // Whether a request may be that of number `at` in a step, whose places are numbered from `first`, of a length at most
    // so many times the longest for which there is room.
    bool begins(const Sequence& its, uint32_t first, int64_t at, uint64_t size, uint64_t requested,
                uint64_t most) const noexcept {
        const size_t i = static_cast<size_t>(
            std::lower_bound(its.places.begin(), its.places.end(), first + static_cast<uint32_t>(at)) - its.places.begin());
        if (i == its.places.size() || its.places[i] != first + at) return false;
        for (const Key& key : its.keys)
            if (key.request == i)
                return is_length(lengths_[static_cast<size_t>(its.lengths) + key.number], requested, most);
        return (growths_.empty() || (growths_[its.places[i]].linear == 0 && growths_[its.places[i]].square == 0))
               && its.matcher.size_of(static_cast<int64_t>(i)) == size;
    }

    // The home stream is stream 0 in a plan. What is stream 0 in the program is another stream then, and has its name;
    // but memory that the host uses has no streams.
    uint64_t named(uint64_t handle) const noexcept {
        if (handle == home_) return 0;
        return handle == 0 && home_ != ~uint64_t{0} ? home_ : handle;
    }

    static uint64_t from(uint32_t cell) noexcept { return ~uint64_t{0} << (cell & 63); }

    // The masks of the cells [first, end), which are not none, word by word.
    template <class Do>
    static void each_word(uint32_t first, uint32_t end, Do act) noexcept {
        const uint32_t last = (end - 1) >> 6;
        uint32_t word = first >> 6;
        uint64_t mask = from(first);
        for (; word < last; ++word, mask = ~uint64_t{0}) act(word, mask);
        act(last, mask & (~uint64_t{0} >> (63 - ((end - 1) & 63))));
    }
    static void set(std::vector<uint64_t>& bits, uint32_t first, uint32_t end) noexcept {
        if (first < end) each_word(first, end, [&](uint32_t word, uint64_t mask) { bits[word] |= mask; });
    }
    static void clear(std::vector<uint64_t>& bits, uint32_t first, uint32_t end) noexcept {
        if (first < end) each_word(first, end, [&](uint32_t word, uint64_t mask) { bits[word] &= ~mask; });
    }
    // Turns the bits of a place over, and tells whether one of them was set. Called again, it undoes that. Always looks at
    // kMasks words: a branch for each would often be foretold wrongly.
    bool flip(const Place& place) noexcept {
        uint64_t* word = taken_.data() + (place.first >> 6);
        uint64_t found = 0;
        for (int i = 0; i < kMasks; ++i) {
            found |= word[i] & place.mask[i];
            word[i] ^= place.mask[i];
        }
        uint64_t* const last = taken_.data() + ((place.end - 1) >> 6);
        if (__builtin_expect(last - word >= kMasks, 0)) found |= flip_rest(word + kMasks, last, place.end);
        return found != 0;
    }
    static uint64_t flip_rest(uint64_t* word, uint64_t* last, uint32_t end) noexcept {
        uint64_t found = 0;
        for (; word != last; ++word) {
            found |= *word;
            *word = ~*word;
        }
        const uint64_t mask = ~uint64_t{0} >> (63 - ((end - 1) & 63));
        found |= *word & mask;
        *word ^= mask;
        return found;
    }
    // Whether something lies in a place: all of a region that is absent counts as taken.
    bool lives(size_t place) const noexcept { return present[region_of(places_[place].offset)] && is_taken(place); }
    bool is_taken(size_t place) const noexcept { return any(taken_, places_[place].first, places_[place].end); }
    Place place_at(uint64_t offset, uint64_t size) const noexcept {
        Place place;
        place.offset = offset;
        place.size = size;
        place.first = cell_at(offset);
        place.end = cell_at(offset + size);
        each_word(place.first, place.end, [&](uint32_t word, uint64_t mask) {
            if (word - (place.first >> 6) < kMasks) place.mask[word - (place.first >> 6)] = mask;
        });
        return place;
    }
    static bool any(const std::vector<uint64_t>& bits, uint32_t first, uint32_t end) noexcept {
        uint64_t found = 0;
        if (first < end) each_word(first, end, [&](uint32_t word, uint64_t mask) { found |= bits[word] & mask; });
        return found != 0;
    }

    // The cell that begins at an offset, or the first one behind it.
    uint32_t cell_at(uint64_t offset) const noexcept {
        return static_cast<uint32_t>(std::lower_bound(cells_.begin(), cells_.end(), offset) - cells_.begin());
    }
    uint32_t cell_around(uint64_t offset) const noexcept {
        return static_cast<uint32_t>(std::upper_bound(cells_.begin(), cells_.end(), offset) - cells_.begin()) - 1;
    }
    // The first guest that ends behind an offset.
    size_t guest_from(uint64_t offset) const noexcept {
        return static_cast<size_t>(std::partition_point(guests_.begin(), guests_.end(), [=](const Guest& guest) {
            return guest.offset + guest.size <= offset;
        }) - guests_.begin());
    }

    // Takes a place. False: a block or a guest lies in it, and nothing has changed.
    bool occupy(int64_t place, uint64_t size) noexcept {
        const Place& wanted = places_[place];
        if (__builtin_expect(size > wanted.size, 0)) return false;  // of a step that is longer than there is room for
        if (__builtin_expect(flip(wanted) || (obstacles_ != 0 && is_obstructed(wanted)), 0)) {
            flip(wanted);
            return false;
        }
        ++alive;
        ++counts.hits;
        counts.hit_bytes += size;
        return true;
    }

    bool is_obstructed(const Place& wanted) const noexcept {
        const size_t next = guest_from(wanted.offset);
        if (next < guests_.size() && guests_[next].offset < wanted.offset + wanted.size) return true;
        return is_partly_away(wanted.offset, wanted.size);
    }
    void count_obstacles() noexcept {
        obstacles_ = guests_.size();
        for (const auto& bits : away_)
            for (const uint64_t word : bits) obstacles_ += static_cast<size_t>(__builtin_popcountll(word));
    }

    uint64_t page_size() const noexcept { return uint64_t{1} << page_shift_; }
    uint64_t start_of(int region) const noexcept { return region ? base_ : 0; }
    uint64_t end_of(int region) const noexcept { return region ? span_ : base_; }
    uint32_t page_of(uint64_t offset) const noexcept {
        return static_cast<uint32_t>((offset - start_of(region_of(offset))) >> page_shift_);
    }
    uint32_t last_page(uint64_t offset, uint64_t size) const noexcept {
        return static_cast<uint32_t>((offset + size - 1 - start_of(region_of(offset))) >> page_shift_);
    }
    bool is_partly_away(uint64_t offset, uint64_t size) const noexcept {
        return has_pages() && any(away_[region_of(offset)], page_of(offset), last_page(offset, size) + 1);
    }

    // The pages that lie wholly in an area: [first, end). What lies behind a region on its last page is nobody's.
    std::pair<uint32_t, uint32_t> pages_in(const Area& area) const noexcept {
        const int region = region_of(area.begin);
        const uint64_t start = start_of(region);
        const bool is_last = area.end == end_of(region);
        return {static_cast<uint32_t>((area.begin - start + page_size() - 1) >> page_shift_),
                is_last ? pages(region) : static_cast<uint32_t>((area.end - start) >> page_shift_)};
    }
    bool is_own_page(uint32_t stream, int region, uint32_t page) const noexcept {
        for (const Area& area : areas_) {
            if (area.stream != stream || region_of(area.begin) != region) continue;
            const auto [first, end] = pages_in(area);
            if (page >= first && page < end) return true;
        }
        return false;
    }

    // Notes the pages of an area in which nothing lives.
    void mark_idle(const Area& area) noexcept {
        const int region = region_of(area.begin);
        const uint64_t start = start_of(region);
        const auto [page, end] = pages_in(area);
        if (page >= end) return;
        std::vector<uint64_t>& bits = lendable_[region];
        set(bits, page, end);
        uint32_t cell = cell_around(area.begin);
        const uint32_t stop = cell_at(area.end);
        while (cell < stop && (cell = next(taken_, cell, stop, true)) < stop) {
            const uint32_t after = next(taken_, cell, stop, false);
            clear(bits, static_cast<uint32_t>((cells_[cell] - start) >> page_shift_),
                  static_cast<uint32_t>((cells_[after] - 1 - start) >> page_shift_) + 1);
            cell = after;
        }
        for (size_t i = guest_from(area.begin); i < guests_.size() && guests_[i].offset < area.end; ++i)
            clear(bits, page_of(guests_[i].offset), last_page(guests_[i].offset, guests_[i].size) + 1);
    }

    int64_t smallest_gap(const std::vector<uint64_t>& bits, uint32_t stream, uint64_t size) const noexcept {
        uint64_t least = ~uint64_t{0};
        int64_t best = kNone;
        for (const Area& area : areas_) {
            if (area.stream != stream) continue;
            uint32_t cell = cell_at(area.begin);
            const uint32_t end = cell_at(area.end);
            while (cell < end && (cell = next(bits, cell, end, false)) < end) {
                const uint32_t stop = next(bits, cell, end, true);
                look_between(cells_[cell], cells_[stop], size, least, best);
                cell = stop;
            }
        }
        return best;
    }

    // The gaps that guests leave between two offsets.
    void look_between(uint64_t at, uint64_t end, uint64_t size, uint64_t& least, int64_t& best) const noexcept {
        for (size_t i = guest_from(at); at < end; ++i) {
            const bool is_last = i == guests_.size() || guests_[i].offset >= end;
            const uint64_t stop = is_last ? end : guests_[i].offset;
            look_at_gap(at, stop, size, least, best);
            if (is_last) return;
            at = guests_[i].offset + guests_[i].size;
        }
    }

    // What of a gap is not on pages that are away.
    void look_at_gap(uint64_t at, uint64_t end, uint64_t size, uint64_t& least, int64_t& best) const noexcept {
        while (at < end && end - at >= size) {
            uint64_t stop = end, after = end;
            if (has_pages()) {
                const int region = region_of(at);
                const uint32_t first = page_of(at), last = last_page(at, end - at) + 1;
                const uint32_t gone = next(away_[region], first, last, true), back = next(away_[region], gone, last, false);
                if (gone < last) stop = std::max(at, start_of(region) + (uint64_t{gone} << page_shift_));
                if (gone < last) after = std::min(end, start_of(region) + (uint64_t{back} << page_shift_));
            }
            if (stop > at && stop - at >= size && stop - at < least) {
                least = stop - at;
                best = static_cast<int64_t>(at);
            }
            at = after;
        }
    }

    // The next cell from `cell` on whose bit is `wanted`, or `end`.
    static uint32_t next(const std::vector<uint64_t>& bits, uint32_t cell, uint32_t end, bool wanted) noexcept {
        while (cell < end) {
            const uint64_t word = (wanted ? bits[cell >> 6] : ~bits[cell >> 6]) & from(cell);
            if (word) return std::min(end, (cell & ~uint32_t{63}) + static_cast<uint32_t>(__builtin_ctzll(word)));
            cell = (cell | 63) + 1;
        }
        return end;
    }
};

}  // namespace bfc
