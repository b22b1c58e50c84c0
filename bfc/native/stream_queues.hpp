// What was freed and waits for streams: a queue for each stream, of marks that it reaches in their order. It has no lock
// of its own, but for its size.
//
// A mark is asked, waited for and dropped by the one thread that has taken it, with no lock held: the device may call
// back. So whatever takes a queue away meanwhile leaves the marks that are taken to those threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <vector>

#include "reasons.hpp"

namespace bfc {

enum MarkKind : uint32_t {
    kPassedMark,  // nothing was queued on the stream, or it was found to be past the mark
    kEvent,       // an event of a native source
    kFence,       // a fence of Python, of which the queue owns a reference
};

struct Mark {
    uint64_t stream;
    void* what;
    uint32_t kind;
};

struct TakenMark {
    Mark mark;
    uint64_t number;
    uint32_t handle;   // of the chunk that waits
    unsigned long by;  // the thread that has taken it
};

struct QueuedMark {
    uint64_t stream;
    uint64_t number;
    uint32_t handle;
};

enum Turn : uint32_t {
    kNoMark,
    kTurnOfAnother,  // that thread is `by`
    kTurnOfPython,   // it is a fence, which was not to be taken
    kYourTurn,       // and the mark is taken
};

class StreamQueues {
public:
    // The one bit of `reasons` is set as long as a fence of Python is queued, the other as long as any other mark is.
    void attach(Reasons* reasons, uint32_t fences, uint32_t events) noexcept {
        reasons_ = reasons;
        fences_bit_ = fences;
        events_bit_ = events;
    }

    // Lets a chunk wait for marks: all of them, or none. False: the host has no memory.
    bool add(uint32_t handle, const std::vector<Mark>& marks) noexcept {
        try {
            const auto freed = std::make_shared<Freed>(Freed{handle, marks.size()});
            Queues made;
            for (const Mark& mark : marks) {
                queues_[mark.stream];
                made[mark.stream].emplace(++last_, Entry{mark, 0, freed});
            }
            for (auto& [stream, entries] : made) queues_.find(stream)->second.merge(entries);
        } catch (...) {
            for (const Mark& mark : marks) drop_if_empty(mark.stream);
            return false;
        }
        for (const Mark& mark : marks) count(mark.kind, 1);
        return true;
    }

    // How many marks are queued. Needs no lock.
    size_t size() const noexcept { return size_.load(std::memory_order_relaxed); }

    // The first stream with a queue, or the one after `stream`. False: there is none.
    bool next_stream(bool first, uint64_t& stream) const noexcept {
        const auto found = first ? queues_.begin() : queues_.upper_bound(stream);
        if (found == queues_.end()) return false;
        stream = found->first;
        return true;
    }

    // Every mark, stream by stream. False: the host has no memory.
    bool list(std::vector<QueuedMark>& out) const noexcept {
        try {
            for (const auto& [stream, queue] : queues_)
                for (const auto& [number, entry] : queue) out.push_back({stream, number, entry.freed->handle});
            return true;
        } catch (...) {
            return false;
        }
    }

    // Takes the oldest mark of a stream, or any one. A thread without the GIL takes no fences: it could not drop one.
    Turn take_first(uint64_t stream, unsigned long thread, bool fences, TakenMark& out) noexcept {
        const auto found = queues_.find(stream);
        if (found == queues_.end()) return kNoMark;
        auto& [number, entry] = *found->second.begin();
        return !fences && entry.mark.kind == kFence ? kTurnOfPython : take_entry(number, entry, thread, out);
    }
    Turn take(const QueuedMark& row, unsigned long thread, TakenMark& out) noexcept {
        Entry* entry = find(row.stream, row.number);
        return entry == nullptr ? kNoMark : take_entry(row.number, *entry, thread, out);
    }

    // What becomes of a mark that was taken. It stays where it is: False if its queue is gone, and then who has taken it
    // drops it.
    bool put_back(const TakenMark& taken) noexcept {
        Entry* entry = find(taken.mark.stream, taken.number);
        if (entry == nullptr) return false;
        const uint32_t before = entry->mark.kind;
        entry->mark = taken.mark;
        entry->by = 0;
        if (taken.mark.kind != before) {  // others read without the lock that something waits, all the time
            count(taken.mark.kind, 1);
            count(before, -1);
        }
        return true;
    }
    // Its stream has reached it: who has taken it drops it. Returns whether the chunk waits for nothing more.
    bool passed(const TakenMark& taken) noexcept {
        const auto entry = take_out(taken);
        return !entry.empty() && --entry.mapped().freed->left == 0;
    }
    // The device failed for it: it is in no queue until it is tried again. False as from `put_back`.
    bool set_aside(const TakenMark& taken) noexcept {
        auto entry = take_out(taken);
        if (entry.empty()) return false;
        entry.mapped().by = 0;
        stuck_.insert(std::move(entry));
        return true;
    }

    // Queues again what was set aside, behind all the others or ahead of them. False: the host has no memory.
    bool try_again(bool ahead) noexcept {
        while (!stuck_.empty()) {
            const auto place = ahead ? std::prev(stuck_.end()) : stuck_.begin();
            const Mark mark = place->second.mark;
            Queue* queue;
            try {
                queue = &queues_[mark.stream];
            } catch (...) {
                return false;
            }
            auto entry = stuck_.extract(place);
            entry.key() = ahead ? --first_ : ++last_;
            queue->insert(std::move(entry));
            count(mark.kind, 1);
        }
        return true;
    }

    // The thread that has taken the oldest mark of a stream; 0: none has.
    unsigned long taken_by(uint64_t stream) const noexcept {
        const auto found = queues_.find(stream);
        return found == queues_.end() ? 0 : found->second.begin()->second.by;
    }
    // Those threads do not exist any more, but for one. `with_events`: nor do those that had taken events.
    void forget_threads(unsigned long but, bool with_events) noexcept {
        for (auto& [stream, queue] : queues_)
            for (auto& [number, entry] : queue)
                if (entry.by != but && (with_events || entry.mark.kind == kFence)) entry.by = 0;
    }

    // Takes out one mark that nobody has taken, to be dropped, and whatever stands before it. False: nothing is left.
    bool pop(Mark& out) noexcept {
        while (!stuck_.empty() || !queues_.empty()) {
            const bool is_stuck = !stuck_.empty();
            Queue& queue = is_stuck ? stuck_ : queues_.begin()->second;
            const auto entry = queue.extract(queue.begin());
            const bool found = entry.mapped().by == 0;
            out = entry.mapped().mark;
            if (!is_stuck) {
                count(out.kind, -1);
                drop_if_empty(out.stream);
            }
            if (found) return true;
        }
        return false;
    }

private:
    struct Freed {
        uint32_t handle;
        size_t left;  // marks that it waits for
    };
    struct Entry {
        Mark mark;
        unsigned long by;  // the thread that has taken it; 0: none
        std::shared_ptr<Freed> freed;
    };
    using Queue = std::map<uint64_t, Entry>;  // by number, oldest first; none is empty
    using Queues = std::map<uint64_t, Queue>;

    static Turn take_entry(uint64_t number, Entry& entry, unsigned long thread, TakenMark& out) noexcept {
        const bool is_free = entry.by == 0;
        if (is_free) entry.by = thread;
        out = {entry.mark, number, entry.freed->handle, entry.by};
        return is_free ? kYourTurn : kTurnOfAnother;
    }

    Entry* find(uint64_t stream, uint64_t number) noexcept {
        const auto queue = queues_.find(stream);
        if (queue == queues_.end()) return nullptr;
        const auto entry = queue->second.find(number);
        return entry == queue->second.end() ? nullptr : &entry->second;
    }

    // A mark that was taken leaves its queue. Empty: it is in none any more.
    Queue::node_type take_out(const TakenMark& taken) noexcept {
        const auto queue = queues_.find(taken.mark.stream);
        if (queue == queues_.end()) return {};
        auto entry = queue->second.extract(taken.number);
        if (entry.empty()) return entry;
        count(entry.mapped().mark.kind, -1);
        drop_if_empty(taken.mark.stream);
        return entry;
    }

    void drop_if_empty(uint64_t stream) noexcept {
        const auto queue = queues_.find(stream);
        if (queue != queues_.end() && queue->second.empty()) queues_.erase(queue);
    }

    void count(uint32_t kind, int by) noexcept {
        (kind == kFence ? fences_ : events_) += static_cast<size_t>(by);
        size_.store(fences_ + events_, std::memory_order_relaxed);
        if (reasons_ == nullptr) return;
        reasons_->put(kind == kFence ? fences_bit_ : events_bit_, (kind == kFence ? fences_ : events_) > 0);
    }

    Queues queues_;
    Queue stuck_;
    uint64_t first_ = uint64_t{1} << 63, last_ = first_;  // numbers of the oldest and of the newest mark
    size_t fences_ = 0, events_ = 0;  // queued
    std::atomic<size_t> size_{0};
    Reasons* reasons_ = nullptr;
    uint32_t fences_bit_ = 0, events_bit_ = 0;
};

}  // namespace bfc
