// Threads that work on one job together, phase after phase.
//
// The caller drives the job. Work within a phase is handed out piece by piece, and the caller waits
// for pieces that somebody has taken, never for a thread: one that the system has paused, or that
// still sleeps, takes part when it is back. Between phases and jobs the helpers look for the next
// one, for a while after a job, since a step consists of several; then they sleep.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

class Pool {
public:
    // One thread's view of a job.
    struct Worker {
        Pool* pool;
        int thread, num_threads;
        uint64_t job;    // number of the job
        uint32_t phase;  // the last one that this thread has seen

        // Calls `f(begin, end)` for pieces of [0, count); returns when all are done, or to a helper
        // when none is left. A helper whose job is over leaves it by an exception.
        template <class F>
        void share(int64_t count, int64_t piece, F f) {
            ++phase;
            if (num_threads == 1) {
                if (count > 0) f((int64_t)0, count);
                return;
            }
            const uint32_t pieces = (uint32_t)((count + piece - 1) / piece);
            if (thread == 0) pool->open(phase);
            else if (!pool->await(*this)) return;
            for (uint32_t own; pool->take(phase, pieces, own);) {
                int64_t begin = own * piece, end = begin + piece < count ? begin + piece : count;
                f(begin, end);
                pool->done_.value.fetch_add(1, std::memory_order_release);
            }
            if (thread == 0) pool->wait_for(pieces);
        }
    };

    // Run `work(worker)` on up to `num_threads` threads, this one among them. It must do the same
    // calls of `share` in each, and touch nothing of the job's but in pieces or right before them.
    void run(int num_threads, const std::function<void(Worker&)>& work) {
        std::lock_guard<std::mutex> one_job(jobs_);
        Worker own{this, 0, num_threads, 0, phase_};
        if (num_threads == 1) return work(own);
        grow(num_threads);
        work_ = &work, wanted_ = num_threads, first_phase_ = phase_;
        job_.value.fetch_add(1);  // odd: open
        if (sleepers_.load()) {
            std::lock_guard<std::mutex> lock(sleep_);
            wake_.notify_all();
        }
        work(own);
        phase_ = own.phase;
        job_.value.fetch_add(1);
        for (auto& helper : helpers_)
            for (int spins = 0; !helper->idle.load(); ++spins) rest(spins);
    }

    static Pool& get() {
        static Pool* pool = new Pool;  // never destroyed: its threads may be at work at exit
        return *pool;
    }

private:
    struct Left {};  // the job is over

    template <class T>
    struct alignas(64) Alone {
        std::atomic<T> value{0};
    };

    // A helper is idle unless it may touch what belongs to a job.
    struct alignas(64) Helper {
        std::atomic<bool> idle{true};
    };

    static void rest(int spins) {
        if (spins < 2048) _mm_pause();
        else std::this_thread::yield();
    }

    // --- the caller ---

    void open(uint32_t phase) {
        done_.value.store(0, std::memory_order_relaxed);
        next_.value.store((uint64_t)phase << 32, std::memory_order_release);
    }

    void wait_for(uint32_t pieces) {
        for (int spins = 0; done_.value.load(std::memory_order_acquire) < pieces; ++spins) rest(spins);
    }

    void grow(int num_threads) {
        while ((int)helpers_.size() < num_threads - 1) {
            helpers_.push_back(std::make_unique<Helper>());
            Helper* helper = helpers_.back().get();
            int thread = (int)helpers_.size();
            std::thread([this, helper, thread] { serve(*helper, thread); }).detach();
        }
    }

    // --- everybody ---

    // Take the next piece of this phase, if it is the present one and there is one left.
    bool take(uint32_t phase, uint32_t pieces, uint32_t& own) {
        uint64_t next = next_.value.load(std::memory_order_acquire);
        do {
            if ((uint32_t)(next >> 32) != phase || (uint32_t)next >= pieces) return false;
        } while (!next_.value.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel));
        own = (uint32_t)next;
        return true;
    }

    // --- helpers ---

    // Wait until the phase is open: false if it is over. Leaves the job if that is over.
    bool await(const Worker& worker) {
        Helper& helper = *helpers_[worker.thread - 1];
        helper.idle.store(true);
        for (int spins = 0;; ++spins) {
            int32_t ahead = (int32_t)((uint32_t)(next_.value.load(std::memory_order_acquire) >> 32) - worker.phase);
            if (ahead >= 0 || job_.value.load() != worker.job) break;
            rest(spins);
        }
        enter(helper, worker.job);
        return (uint32_t)(next_.value.load(std::memory_order_acquire) >> 32) == worker.phase;
    }

    // Be in the job, or out of it by an exception: the caller, which closes it and then looks whether
    // a helper is idle, sees the one or the other.
    void enter(Helper& helper, uint64_t job) {
        helper.idle.store(false);
        if (job_.value.load() != job) {
            helper.idle.store(true);
            throw Left{};
        }
    }

    void serve(Helper& helper, int thread) {
        for (uint64_t seen = 0;;) {
            seen = next_job(seen);
            try {
                enter(helper, seen);
                if (thread < wanted_) {
                    Worker own{this, thread, wanted_, seen, first_phase_};
                    (*work_)(own);
                }
            } catch (const Left&) {
            }
            helper.idle.store(true);
        }
    }

    // The number of an open job after `seen`.
    uint64_t next_job(uint64_t seen) {
        using clock = std::chrono::steady_clock;
        auto is_new = [&](uint64_t job) { return job % 2 == 1 && job != seen; };
        for (;;) {
            auto until = clock::now() + std::chrono::microseconds(200);
            for (int spins = 0; spins % 64 != 63 || clock::now() < until; ++spins) {
                uint64_t job = job_.value.load(std::memory_order_acquire);
                if (is_new(job)) return job;
                _mm_pause();
            }
            std::unique_lock<std::mutex> lock(sleep_);
            sleepers_.fetch_add(1);
            wake_.wait(lock, [&] { return is_new(job_.value.load()); });
            sleepers_.fetch_sub(1);
        }
    }

    std::mutex jobs_, sleep_;
    std::condition_variable wake_;
    std::atomic<int> sleepers_{0};
    std::vector<std::unique_ptr<Helper>> helpers_;
    const std::function<void(Worker&)>* work_ = nullptr;
    int wanted_ = 1;
    uint32_t phase_ = 0, first_phase_ = 0;
    Alone<uint64_t> job_, next_;
    Alone<uint32_t> done_;
};
