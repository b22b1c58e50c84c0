// A differential test: bfc/native/stream_queues.hpp against lists that are searched. Run by test_stream_queues.py.
//
// Usage: test_stream_queues SEED STEPS.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "stream_queues.hpp"

namespace {

using Random = std::mt19937_64;

void require(bool holds, const char* what, uint64_t seed, int step) {
    if (holds) return;
    std::printf("FAILED seed %llu, step %d: %s\n", static_cast<unsigned long long>(seed), step, what);
    std::exit(1);
}

// A thread without the lock reads all the time that something waits, while another takes a mark and puts it back.
bool stays_counted() {
    bfc::StreamQueues queues;
    bfc::Reasons reasons;
    queues.attach(&reasons, 1, 2);
    queues.add(7, {{0, nullptr, bfc::kEvent}});
    std::atomic<bool> over{false};
    std::thread other([&] {
        bfc::TakenMark it;
        for (int i = 0; i < 200000; ++i) {
            queues.take_first(0, 1, true, it);
            queues.put_back(it);
        }
        over = true;
    });
    bool counted = true;
    while (!over) counted = counted && queues.size() == 1 && reasons.has(2);
    other.join();
    bfc::Mark mark;
    while (queues.pop(mark)) {}
    return counted;
}

struct Row {
    uint64_t stream, number;
    uint32_t handle, kind;
    unsigned long by;
    int freed;  // which free it belongs to
};

}  // namespace

int main(int, char** arguments) {
    const uint64_t seed = std::strtoull(arguments[1], nullptr, 10);
    const int steps = std::atoi(arguments[2]);
    require(stays_counted(), "it waits all the time", seed, 0);
    Random random(seed);
    bfc::Reasons reasons;
    bfc::StreamQueues queues;
    queues.attach(&reasons, 1, 2);
    std::vector<Row> model, stuck;
    std::map<int, int> left;
    std::vector<bfc::TakenMark> taken;
    uint64_t numbers = uint64_t{1} << 63, ahead_of = numbers;
    int freed = 0;
    for (int step = 0; step < steps; ++step) {
        const auto check = [&](bool holds, const char* what) { require(holds, what, seed, step); };
        const auto find = [&](const bfc::TakenMark& it) {
            for (size_t i = 0; i < model.size(); ++i)
                if (model[i].number == it.number) return i;
            return model.size();
        };
        const auto draw = random() % 16;
        if (draw < 4) {
            std::vector<bfc::Mark> marks;
            std::set<uint64_t> streams;
            for (size_t i = 0; i <= random() % 3; ++i) streams.insert(random() % 4);
            ++freed;
            for (const uint64_t stream : streams) {
                marks.push_back({stream, nullptr, static_cast<uint32_t>(random() % 3)});
                model.push_back({stream, ++numbers, static_cast<uint32_t>(freed), marks.back().kind, 0, freed});
            }
            left[freed] = static_cast<int>(marks.size());
            check(queues.add(static_cast<uint32_t>(freed), marks), "there is memory");
        } else if (draw < 8) {
            const uint64_t stream = random() % 4;
            bfc::TakenMark it;
            const bool fences = random() % 2;
            const auto turn = queues.take_first(stream, 1 + random() % 2, fences, it);
            size_t first = 0;
            while (first < model.size() && model[first].stream != stream) ++first;
            if (first == model.size()) {
                check(turn == bfc::kNoMark, "nothing is queued");
            } else if (!fences && model[first].kind == bfc::kFence) {
                check(turn == bfc::kTurnOfPython, "a fence stays");
            } else {
                check(it.number == model[first].number && it.handle == model[first].handle, "the oldest");
                check((turn == bfc::kYourTurn) == (model[first].by == 0), "whose turn it is");
                model[first].by = it.by;
                if (turn == bfc::kYourTurn) taken.push_back(it);
            }
        } else if (draw < 13 && !taken.empty()) {
            const size_t which = random() % taken.size();
            bfc::TakenMark it = taken[which];
            taken.erase(taken.begin() + static_cast<std::ptrdiff_t>(which));
            const size_t at = find(it);
            const bool known = at < model.size();
            if (draw < 10) {
                const bool is_last = queues.passed(it);
                if (!known) check(!is_last, "its queue is gone");
                else {
                    check(is_last == (--left[model[at].freed] == 0), "whether it is the last");
                    model.erase(model.begin() + static_cast<std::ptrdiff_t>(at));
                }
            } else if (draw == 10) {
                check(queues.set_aside(it) == known, "whether it is there");
                if (known) {
                    model[at].by = 0;
                    stuck.push_back(model[at]);
                    model.erase(model.begin() + static_cast<std::ptrdiff_t>(at));
                }
            } else {
                it.mark.kind = bfc::kPassedMark;
                check(queues.put_back(it) == known, "whether it is there");
                if (known) model[at].by = 0, model[at].kind = bfc::kPassedMark;
            }
        } else if (draw == 13) {
            const bool ahead = random() % 2;
            check(queues.try_again(ahead), "there is memory");
            std::sort(stuck.begin(), stuck.end(), [](const Row& a, const Row& b) { return a.number < b.number; });
            for (size_t i = 0; !ahead && i < stuck.size(); ++i) stuck[i].number = ++numbers;
            for (size_t i = stuck.size(); ahead && i-- > 0;) stuck[i].number = --ahead_of;
            if (ahead) model.insert(model.begin(), stuck.begin(), stuck.end());
            else model.insert(model.end(), stuck.begin(), stuck.end());
            stuck.clear();
        } else if (draw == 14 && random() % 8 == 0) {
            bfc::Mark mark;
            size_t dropped = 0, kept = taken.size();
            while (queues.pop(mark)) ++dropped;
            check(dropped + kept == model.size() + stuck.size(), "each is dropped here, or by who has taken it");
            model.clear();
            stuck.clear();
            taken.clear();
        }
        size_t fences = 0;
        for (const Row& row : model) fences += row.kind == bfc::kFence;
        check(queues.size() == model.size(), "the size");
        check(reasons.has(1) == (fences > 0) && reasons.has(2) == (fences < model.size()), "the reasons");
        std::vector<bfc::QueuedMark> rows;
        check(queues.list(rows) && rows.size() == model.size(), "the rows");
    }
    std::printf("sound\n");
    bfc::Mark mark;
    while (queues.pop(mark)) {}
    return 0;
}
