/* An allocator that signal handlers may call, and what they do with it. */
#define _GNU_SOURCE
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static char arena[1UL << 30];
static atomic_size_t used;
void *malloc(size_t n) {
    if (n > sizeof arena) { errno = ENOMEM; return 0; }
    size_t at = atomic_fetch_add(&used, (n + 31) & ~15UL);
    return at + n < sizeof arena ? arena + at : 0;
}
static atomic_ulong frees;
void free(void *p) { if (p) atomic_fetch_add(&frees, 1); }
void *realloc(void *p, size_t n) { (void)p; char *q = malloc(n); atomic_signal_fence(memory_order_seq_cst); return q; }

static atomic_ulong handled;
static sigjmp_buf back;
static _Thread_local volatile int armed;

static void allocate_in_handler(int s) {
    (void)s;
    free(malloc(33));
    atomic_fetch_add(&handled, 1);
}
static void jump(int s) { (void)s; if (armed) { armed = 0; siglongjmp(back, 1); } }
static void with_signals(void (*handler)(int), void (*work)(long), long n) {
    struct sigaction a, before;
    memset(&a, 0, sizeof a);
    a.sa_handler = handler;
    sigaction(SIGUSR1, &a, &before);
    /* A timer, not a thread that sends signals: it needs no processor of its own. */
    struct sigevent event;
    memset(&event, 0, sizeof event);
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGUSR1;
    event._sigev_un._tid = gettid();
    timer_t t;
    struct itimerspec every = {{0, 20000}, {0, 20000}};
    timer_create(CLOCK_MONOTONIC, &event, &t);
    timer_settime(t, 0, &every, 0);
    work(n);
    timer_delete(t);
    sigaction(SIGUSR1, &before, 0);
}
static void pairs(long n) { for (long i = 0; i < n; i++) free(realloc(malloc(10 + (i & 63)), 20)); }
static void jumping(long n) {
    for (volatile long i = 0; i < n; i++) {
        if (!sigsetjmp(back, 1)) { armed = 1; for (int k = 0; k < 100; k++) free(malloc(16)); }
        armed = 0;
    }
}
/* Calls made: 2 n, and as many as handlers ran. */
unsigned long toy_signals(long n) { unsigned long before = handled; with_signals(allocate_in_handler, pairs, n); return handled - before; }
void toy_jumps(long n) { with_signals(jump, jumping, n); }
void toy_pairs(long n) { pairs(n); }
unsigned long toy_used(void) { return used; }
void toy_reset(void) { used = 0; }
/* What musl's allocator is recognized by: its functions are those of the C interface. */
void __simple_malloc(void) {}
