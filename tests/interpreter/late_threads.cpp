// Threads of C++ that ask for the GIL late: preloaded, this library stands before Python's own function.
#include <Python.h>
#include <bfc_allocator.h>
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace {

constexpr int kMostMilliseconds = 1000;     // the exit waits for twice that

struct Managed { char tensor[48]; void* context; void (*deleter)(Managed*); };

std::atomic<bool> is_late{false};
std::atomic<bool> python_is_gone{false};

// What the C library calls after Python's end. The thread gets some time to do its harm.
__attribute__((destructor)) void end() {
    python_is_gone = true;
    if (is_late) usleep(200000);
}

// Starts a thread that does this, and returns when it is about to ask for the GIL.
template <class Work>
void start(Work work) {
    std::thread(work).detach();
    while (!is_late) usleep(1000);
}

}  // namespace

extern "C" {

PyGILState_STATE PyGILState_Ensure() {
    static const auto real = reinterpret_cast<PyGILState_STATE (*)()>(dlsym(RTLD_NEXT, "PyGILState_Ensure"));
    if (getpid() != static_cast<pid_t>(syscall(SYS_gettid))) {
        is_late = true;
        for (int passed = 0; passed < kMostMilliseconds && !python_is_gone; ++passed) usleep(1000);
    }
    return real();
}

void let_go(Managed* managed) {
    start([=] {
        managed->deleter(managed);
        (void)!write(STDOUT_FILENO, "let go\n", 7);
    });
}

// One of the functions that take the GIL, by its place in the test's list.
void call(const bfc_allocator* table, int which) {
    start([=] {
        void* self = table->self;
        void* ptr = nullptr;
        size_t free = 0, total = 0;
        bfc_device_stats stats;
        char why[256];
        if (which == 0) table->allocate(self, 0, 1000, 0, &ptr, why, sizeof why);
        if (which == 1) table->record_stream(self, ptr, 7, why, sizeof why);
        if (which == 2) table->copy(self, ptr, ptr, 0, 0, why, sizeof why);
        if (which == 3) table->empty(self, why, sizeof why);
        if (which == 4) table->stats(self, 0, &stats, why, sizeof why);
        if (which == 5) table->reset_accumulated_stats(self, 0, why, sizeof why);
        if (which == 6) table->reset_peak_stats(self, 0, why, sizeof why);
        if (which == 7) table->memory_info(self, 0, &free, &total, why, sizeof why);
        if (which == 8) table->retain(self);
        if (which == 9) table->release(self);
    });
}

}
