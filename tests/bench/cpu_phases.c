/* Times each phase of a step: the kernels call `timed_run` for `pool_run` (a macro of the build), and
 * the bench reads what it recorded. One pool at a time; not for the product. */
#undef pool_run
#include "cpu.h"

#include <stdatomic.h>
#include <time.h>

#define PHASES_MAX 65536

typedef struct {
    double wall_s, busy_s; /* from start to end; the threads' time inside tasks, summed */
    int64_t tasks;
} Phase;

typedef struct {
    Task task;
    void *arg;
    _Atomic int64_t busy_ns;
} Timed;

static Phase phases[PHASES_MAX];
static int recorded;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void timed_task(void *arg, int index) {
    Timed *timed = arg;
    const int64_t start = now_ns();
    timed->task(timed->arg, index);
    atomic_fetch_add(&timed->busy_ns, now_ns() - start);
}

void timed_run(Pool *pool, Task task, void *arg, int tasks) {
    Timed timed = {task, arg, 0};
    const int64_t start = now_ns();
    pool_run(pool, timed_task, &timed, tasks);
    if (recorded < PHASES_MAX)
        phases[recorded++] = (Phase){(double)(now_ns() - start) * 1e-9,
                                     (double)timed.busy_ns * 1e-9, tasks};
}

/* Return the phases since the last call, and forget them. */
int take_phases(const Phase **out) {
    const int count = recorded;
    *out = phases;
    recorded = 0;
    return count;
}
