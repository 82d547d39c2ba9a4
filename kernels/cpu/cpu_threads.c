/* A thread pool that spins only briefly, because the gateway shares the cores.
 *
 * A phase is a function and a number of tasks. Threads claim tasks one by one from `ticket`, so a
 * preempted thread delays only its own task, and a sleeping thread delays none. The word has both
 * the number of tasks and the next task: a successful compare-and-swap claims a task of the phase
 * that the word describes, and a phase does not end before its tasks are done.
 *
 *     ticket: | tasks : 32 | next : 32 |
 */
#include "cpu.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#define SPINS 1500 /* about 20 us: covers the time between two phases, not between two steps */

struct Pool {
    _Atomic uint64_t ticket;
    char pad0[56];
    _Atomic uint32_t done;
    char pad1[60];
    Task task;
    void *arg;
    _Atomic int asleep, waiting, stopping;
    pthread_mutex_t mutex;
    pthread_cond_t work, finished;
    int workers;
    pthread_t threads[];
};

static void pause_core(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int has_work(Pool *pool) {
    uint64_t ticket = atomic_load(&pool->ticket);
    return (uint32_t)ticket < ticket >> 32;
}

static void work(Pool *pool) {
    for (;;) {
        uint64_t ticket = atomic_load(&pool->ticket);
        do {
            if ((uint32_t)ticket >= ticket >> 32) return;
        } while (!atomic_compare_exchange_weak(&pool->ticket, &ticket, ticket + 1));
        pool->task(pool->arg, (int)(uint32_t)ticket);
        if (atomic_fetch_add(&pool->done, 1) + 1 == ticket >> 32 && atomic_load(&pool->waiting)) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->finished);
            pthread_mutex_unlock(&pool->mutex);
        }
    }
}

static void *worker(void *arg) {
    Pool *pool = arg;
    while (!atomic_load(&pool->stopping)) {
        work(pool);
        int spins = SPINS;
        while (spins && !has_work(pool)) {
            pause_core();
            spins--;
        }
        if (spins) continue;
        pthread_mutex_lock(&pool->mutex);
        atomic_fetch_add(&pool->asleep, 1);
        while (!has_work(pool) && !atomic_load(&pool->stopping))
            pthread_cond_wait(&pool->work, &pool->mutex);
        atomic_fetch_sub(&pool->asleep, 1);
        pthread_mutex_unlock(&pool->mutex);
    }
    return NULL;
}

Pool *pool_new(int threads) {
    int workers = threads > 1 ? threads - 1 : 0;
    Pool *pool = calloc(1, sizeof *pool + (size_t)workers * sizeof(pthread_t));
    if (!pool) return NULL;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->finished, NULL);
    for (int i = 0; i < workers; i++) {
        if (pthread_create(&pool->threads[i], NULL, worker, pool)) break;
        pool->workers++;
    }
    return pool;
}

void pool_free(Pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->stopping, 1);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 0; i < pool->workers; i++) pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->finished);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

void pool_run(Pool *pool, Task task, void *arg, int tasks) {
    if (tasks <= 1 || !pool->workers) {
        for (int i = 0; i < tasks; i++) task(arg, i);
        return;
    }
    pool->task = task;
    pool->arg = arg;
    atomic_store(&pool->done, 0);
    atomic_store(&pool->ticket, (uint64_t)(uint32_t)tasks << 32);
    if (atomic_load(&pool->asleep)) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->work);
        pthread_mutex_unlock(&pool->mutex);
    }
    work(pool);
    for (int spins = SPINS; spins; spins--) {
        if (atomic_load(&pool->done) == (uint32_t)tasks) return;
        pause_core();
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->waiting, 1);
    while (atomic_load(&pool->done) != (uint32_t)tasks)
        pthread_cond_wait(&pool->finished, &pool->mutex);
    atomic_store(&pool->waiting, 0);
    pthread_mutex_unlock(&pool->mutex);
}
