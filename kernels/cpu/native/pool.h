// Threads that work on one job together, with barriers between its phases.
//
// The caller is thread 0. Work within a phase is handed out piece by piece, so that a thread that
// the system has paused holds up no more than one piece. After a job the others keep looking for
// the next one for a while, since a step consists of several; then they sleep.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <immintrin.h>

class Pool {
public:
    // The view of one thread of a job.
    struct Worker {
        Pool* pool;
        int thread, num_threads;
        uint32_t phase = 0;  // calls of `share` so far

        void barrier() { pool->wait_for_all(); }

        // Calls `f(begin, end)` for pieces of [0, count) until none is left, then waits for all.
        template <class F>
        void share(int64_t count, int64_t piece, F f) {
            if (num_threads == 1) {
                if (count > 0) f((int64_t)0, count);
                return;
            }
            std::atomic<int64_t>& next = pool->next_[phase & 1].value;
            for (;;) {
                int64_t begin = next.fetch_add(piece, std::memory_order_relaxed);
                if (begin >= count) break;
                f(begin, begin + piece < count ? begin + piece : count);
            }
            // the counter of the phase before: all have left it, and none is in the next one yet
            if (thread == 0) pool->next_[(phase + 1) & 1].value.store(0, std::memory_order_relaxed);
            ++phase;
            barrier();
        }
    };

    // Run `job(worker)` on `num_threads` threads, this one among them.
    void run(int num_threads, const std::function<void(Worker&)>& job) {
        std::lock_guard<std::mutex> one_job(jobs_);
        grow(num_threads);
        job_ = &job, wanted_ = num_threads;
        arrived_.value.store(0), next_[0].value.store(0), next_[1].value.store(0);
        done_.value.store(0);
        if (num_threads > 1) {
            generation_.value.fetch_add(1);
            if (sleepers_.load()) {
                std::lock_guard<std::mutex> lock(sleep_);
                wake_.notify_all();
            }
        }
        Worker own{this, 0, num_threads};
        job(own);
        for (int spins = 0; done_.value.load() < (int)threads_.size() && num_threads > 1; ++spins)
            rest(spins);
    }

    static Pool& get() {
        static Pool* pool = new Pool;  // never destroyed: its threads may be at work at exit
        return *pool;
    }

private:
    struct alignas(64) Counter { std::atomic<int64_t> value{0}; };

    static void rest(int spins) {
        if (spins < 4096) _mm_pause();
        else std::this_thread::yield();
    }

    void wait_for_all() {
        if (wanted_ == 1) return;
        int64_t ticket = arrived_.value.fetch_add(1);
        int64_t all = (ticket / wanted_ + 1) * wanted_;
        for (int spins = 0; arrived_.value.load(std::memory_order_acquire) < all; ++spins) rest(spins);
    }

    void grow(int num_threads) {
        while ((int)threads_.size() < num_threads - 1) {
            int index = (int)threads_.size() + 1;
            threads_.emplace_back([this, index, seen = generation_.value.load()] { loop(index, seen); });
            threads_.back().detach();
        }
    }

    void loop(int index, int64_t seen) {
        for (;;) {
            await(seen);
            ++seen;
            if (index < wanted_) {
                Worker own{this, index, wanted_};
                (*job_)(own);
            }
            done_.value.fetch_add(1);
        }
    }

    void await(int64_t seen) {
        using clock = std::chrono::steady_clock;
        auto until = clock::now() + std::chrono::microseconds(200);
        for (int spins = 0;; ++spins) {
            if (generation_.value.load(std::memory_order_acquire) != seen) return;
            _mm_pause();
            if (spins % 64 == 63 && clock::now() > until) break;
        }
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return generation_.value.load() != seen; });
        sleepers_.fetch_sub(1);
    }

    std::mutex jobs_, sleep_;
    std::condition_variable wake_;
    std::atomic<int> sleepers_{0};
    std::vector<std::thread> threads_;
    const std::function<void(Worker&)>* job_ = nullptr;
    int wanted_ = 1;
    Counter generation_, arrived_, done_, next_[2];
};
