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
#include <list>
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
            std::map<uint64_t, Queue> made;
            for (const Mark& mark : marks) {
                queues_[mark.stream];
                made[mark.stream].push_back({mark, ++numbers_, 0, freed});
            }
            for (auto& [stream, entries] : made) {
                Queue& queue = queues_.find(stream)->second;
                queue.splice(queue.end(), entries);
            }
        } catch (...) {
            for (const Mark& mark : marks) drop_if_empty(mark.stream);
            return false;
        }
        for (const Mark& mark : marks) count(mark.kind, 1);
        return true;
    }

    // How many marks are queued. Needs no lock.
    size_t size() const noexcept { return size_.load(std::memory_order_relaxed); }

    // The first stream with a queue, and the next one. False: there is none.
    bool first_stream(uint64_t& stream) const noexcept { return read_stream(queues_.begin(), stream); }
    bool next_stream(uint64_t& stream) const noexcept { return read_stream(queues_.upper_bound(stream), stream); }

    // Every mark, stream by stream. False: the host has no memory.
    bool list(std::vector<QueuedMark>& out) const noexcept {
        try {
            for (const auto& [stream, queue] : queues_)
                for (const Entry& entry : queue) out.push_back({stream, entry.number, entry.freed->handle});
            return true;
        } catch (...) {
            return false;
        }
    }

    // Takes the oldest mark of a stream, or any one. A thread without the GIL takes no fences: it could not drop one.
    Turn take_first(uint64_t stream, unsigned long thread, bool fences, TakenMark& out) noexcept {
        const auto found = queues_.find(stream);
        if (found == queues_.end()) return kNoMark;
        Entry& entry = found->second.front();
        return !fences && entry.mark.kind == kFence ? kTurnOfPython : take_entry(entry, thread, out);
    }
    Turn take(const QueuedMark& row, unsigned long thread, TakenMark& out) noexcept {
        Entry* entry = find(row.stream, row.number);
        return entry == nullptr ? kNoMark : take_entry(*entry, thread, out);
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
        const auto queue = queues_.find(taken.mark.stream);
        if (queue == queues_.end()) return false;
        for (auto entry = queue->second.begin(); entry != queue->second.end(); ++entry) {
            if (entry->number != taken.number) continue;
            const bool waits = --entry->freed->left > 0;
            count(entry->mark.kind, -1);
            queue->second.erase(entry);
            drop_if_empty(taken.mark.stream);
            return !waits;
        }
        return false;
    }
    // The device failed for it: it is in no queue until it is tried again. False as from `put_back`.
    bool set_aside(const TakenMark& taken) noexcept {
        const auto queue = queues_.find(taken.mark.stream);
        if (queue == queues_.end()) return false;
        for (auto entry = queue->second.begin(); entry != queue->second.end(); ++entry) {
            if (entry->number != taken.number) continue;
            count(entry->mark.kind, -1);
            entry->by = 0;
            stuck_.splice(stuck_.end(), queue->second, entry);
            drop_if_empty(taken.mark.stream);
            return true;
        }
        return false;
    }

    // Queues again what was set aside, behind all the others or ahead of them. False: the host has no memory.
    bool try_again(bool ahead) noexcept {
        while (!stuck_.empty()) {
            const auto entry = ahead ? std::prev(stuck_.end()) : stuck_.begin();
            try {
                Queue& queue = queues_[entry->mark.stream];
                queue.splice(ahead ? queue.begin() : queue.end(), stuck_, entry);
            } catch (...) {
                return false;
            }
            count(entry->mark.kind, 1);
        }
        return true;
    }

    // The thread that has taken the oldest mark of a stream; 0: none has.
    unsigned long taken_by(uint64_t stream) const noexcept {
        const auto found = queues_.find(stream);
        return found == queues_.end() ? 0 : found->second.front().by;
    }
    // Those threads do not exist any more, but for one. `with_events`: nor do those that had taken events.
    void forget_threads(unsigned long but, bool with_events) noexcept {
        for (auto& [stream, queue] : queues_)
            for (Entry& entry : queue)
                if (entry.by != but && (with_events || entry.mark.kind == kFence)) entry.by = 0;
    }

    // Takes out one mark that nobody has taken, to be dropped, and whatever stands before it. False: nothing is left.
    bool pop(Mark& out) noexcept {
        while (!stuck_.empty() || !queues_.empty()) {
            const bool is_stuck = !stuck_.empty();
            Queue& queue = is_stuck ? stuck_ : queues_.begin()->second;
            const Entry& entry = queue.front();
            const bool found = entry.by == 0;
            const uint64_t stream = entry.mark.stream;
            out = entry.mark;
            if (!is_stuck) count(entry.mark.kind, -1);
            queue.pop_front();
            if (!is_stuck) drop_if_empty(stream);
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
        uint64_t number;
        unsigned long by;  // the thread that has taken it; 0: none
        std::shared_ptr<Freed> freed;
    };
    using Queue = std::list<Entry>;  // none is empty
    using Queues = std::map<uint64_t, Queue>;

    bool read_stream(Queues::const_iterator at, uint64_t& stream) const noexcept {
        if (at == queues_.end()) return false;
        stream = at->first;
        return true;
    }

    static Turn take_entry(Entry& entry, unsigned long thread, TakenMark& out) noexcept {
        const bool is_free = entry.by == 0;
        if (is_free) entry.by = thread;
        out = {entry.mark, entry.number, entry.freed->handle, entry.by};
        return is_free ? kYourTurn : kTurnOfAnother;
    }

    Entry* find(uint64_t stream, uint64_t number) noexcept {
        const auto queue = queues_.find(stream);
        if (queue != queues_.end())
            for (Entry& entry : queue->second)
                if (entry.number == number) return &entry;
        return nullptr;
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
    uint64_t numbers_ = 0;
    size_t fences_ = 0, events_ = 0;  // queued
    std::atomic<size_t> size_{0};
    Reasons* reasons_ = nullptr;
    uint32_t fences_bit_ = 0, events_bit_ = 0;
};

}  // namespace bfc
