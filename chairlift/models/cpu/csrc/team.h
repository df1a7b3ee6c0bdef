// The threads of one parallel region, and how they share work.
#pragma once

#include <sched.h>

#include <atomic>
#include <climits>
#include <cstdint>

#include "checks.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__APPLE__) || defined(CHAIRLIFT_OWN_THREADS)
#include <pthread.h>

constexpr int MOST_THREADS = 256;

// Runs `work(rank, size)` on that many threads, or as many as can be created. They are created for each call, since
// torch has no OpenMP runtime here whose threads could be shared, and so that a sanitizer sees all that they do.
template <class Work> void on_threads(int num_threads, Work work) {
    struct Region {
        Work& work;
        std::atomic<int> size{0};  // 0: the number of threads is not known yet
    } region{work};
    struct Member {
        Region* region;
        int rank;
        pthread_t thread;
    } members[MOST_THREADS];
    const auto run = [](void* data) -> void* {
        const Member& own = *static_cast<Member*>(data);
        int size = 0;
        while (!(size = own.region->size.load(std::memory_order_acquire))) sched_yield();
        own.region->work(own.rank, size);
        return nullptr;
    };
    int size = 1;
    for (; size < num_threads && size < MOST_THREADS; size++) {
        members[size].region = &region;
        members[size].rank = size;
        if (pthread_create(&members[size].thread, nullptr, run, &members[size])) break;
    }
    region.size.store(size, std::memory_order_release);
    work(0, size);
    for (int rank = 1; rank < size; rank++) pthread_join(members[rank].thread, nullptr);
}

#else

// Functions of every OpenMP runtime, LLVM's included. No pragmas: with them each compiler would call its own.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
int omp_get_thread_num();
int omp_get_num_threads();
}

// Runs `work(rank, size)` on that many threads of the pool that torch uses, too.
template <class Work> void on_threads(int num_threads, Work work) {
    const auto run = [](void* data) { (*static_cast<Work*>(data))(omp_get_thread_num(), omp_get_num_threads()); };
    GOMP_parallel(run, &work, unsigned(num_threads), 0);
}

#endif

struct alignas(64) Counter {
    std::atomic<int64_t> taken;
};

// A pass has hundreds of these. A waiting thread spins for about as long as stages differ (0.1 ms), then sleeps,
// because the thread that it waits for has lost its core to another program. Yielding the core instead gives a whole
// time slice away: beside one busy program a step took up to 30 times as long. (OpenMP's own barrier spins for long.)
struct Barrier {
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> generation{0};
    std::atomic<int> num_sleeping{0};

    void wait(int size) {
        constexpr int SPINS = 2000;
        const int before = generation.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived.store(0, std::memory_order_relaxed);
            generation.store(before + 1);
            if (num_sleeping.load()) wake_all();
            return;
        }
        for (int spins = 0; spins < SPINS; spins++) {
            if (generation.load(std::memory_order_acquire) != before) return;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            __asm__ volatile("isb");  // as long as a pause; "yield" takes no time on most processors
#endif
        }
        num_sleeping.fetch_add(1);  // before the last check, so that the last thread sees it, or is seen
        while (generation.load() == before) sleep_while(before);
        num_sleeping.fetch_sub(1);
    }

  private:
#if defined(__linux__)
    void sleep_while(int value) { syscall(SYS_futex, &generation, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0); }
    void wake_all() { syscall(SYS_futex, &generation, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
    void sleep_while(int) { sched_yield(); }
    void wake_all() {}
#endif
};

// Each thread has a contiguous share of a stage's units, so that it reads memory in order. A thread that is done early
// goes on with units of the others' shares, beginning with the next thread's. For 11 units, such as tasks of attention:
//
//     thread      0          1            2
//     units    | 0 1 2 | 3 4 5 6 | 7 8 9 10 |
//     counter    taken    taken     taken        how many units of the share have begun, or more
//
// Stages follow one another in the same order on every thread, and each has counters of its own.
struct Team {
    const int rank, size;
    Counter* counters;  // [stages][size], all 0 at first; those of the next stage
    Barrier& barrier;
    const Counter* const end;  // of the counters

    template <class Work> void share(int64_t num_units, Work work) {
        CHECK(counters + size <= end);
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

    // Shares `num_rows` rows, some at a time.
    template <class Work> void share_rows(int64_t num_rows, Work work) {
        constexpr int64_t AT_ONCE = 4;
        share((num_rows + AT_ONCE - 1) / AT_ONCE, [&](int64_t unit) {
            for (int64_t row = unit * AT_ONCE; row < num_rows && row < (unit + 1) * AT_ONCE; row++) work(row);
        });
    }

    // Returns when all threads have reached it.
    void wait() { barrier.wait(size); }
};
