// The threads of one parallel region, and how they share work.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

struct alignas(64) Counter {
    std::atomic<int64_t> taken;
};

// A pass has hundreds of these, so a thread that waits must not keep the core from the one that it waits for, as
// happens when other programs run: it spins for some microseconds only, then gives way. (OpenMP's own spins for long.)
struct Barrier {
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> generation{0};

    void wait(int size) {
        constexpr int SPINS = 400;
        const int before = generation.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived.store(0, std::memory_order_relaxed);
            generation.store(before + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; generation.load(std::memory_order_acquire) == before; spins++) {
            if (spins >= SPINS) {
                sched_yield();
                continue;
            }
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    }
};

// Each thread has a contiguous share of a stage's units, so that it reads memory in order; who is done early takes
// units from the others' shares. Stages follow one another in the same order on every thread.
struct Team {
    const int rank, size;
    Counter* counters;  // [stages][size], all 0 at first
    Barrier& barrier;

    template <class Work> void share(int64_t num_units, Work work) {
        for (int i = 0; i < size; i++) {
            const int whose = (rank + i) % size;
            const int64_t end = num_units * (whose + 1) / size;
            const int64_t start = num_units * whose / size;
            for (;;) {
                if (counters[whose].taken.load(std::memory_order_relaxed) >= end - start) break;
                const int64_t unit = start + counters[whose].taken.fetch_add(1, std::memory_order_relaxed);
                if (unit >= end) break;
                work(unit);
            }
        }
        counters += size;
    }

    // `num_rows` rows, some at a time.
    template <class Work> void share_rows(int64_t num_rows, Work work) {
        constexpr int64_t AT_ONCE = 4;
        share((num_rows + AT_ONCE - 1) / AT_ONCE, [&](int64_t unit) {
            for (int64_t row = unit * AT_ONCE; row < num_rows && row < (unit + 1) * AT_ONCE; row++) work(row);
        });
    }

    // All threads have done what comes before.
    void wait() { barrier.wait(size); }
};
