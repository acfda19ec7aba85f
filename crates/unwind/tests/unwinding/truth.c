/* Call paths whose every frame is known: the callback captures the stack. */
#define _GNU_SOURCE
#include <alloca.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <ucontext.h>

#define FRAME __attribute__((noinline, noclone, visibility("default")))
typedef void (*callback)(void);
volatile int sink;
static callback current;

FRAME int recurse(callback capture, int depth) {
    if (depth == 0) {
        capture();
        return sink;
    }
    int result = recurse(capture, depth - 1);
    sink += result;
    return result + 1;
}

FRAME int recurse_alloca(callback capture, int depth) {
    volatile char *space = alloca(16 + 8 * (depth % 5));
    space[0] = (char)depth;
    int result = 0;
    if (depth == 0)
        capture();
    else
        result = recurse_alloca(capture, depth - 1);
    return result + space[0];
}

FRAME int realigned(callback capture, int depth) {
    volatile char block[64] __attribute__((aligned(64)));
    volatile char *space = alloca(16 + depth);
    block[0] = space[0] = (char)depth;
    int result = 0;
    if (depth == 0)
        capture();
    else
        result = realigned(capture, depth - 1);
    return result + block[0] + space[0];
}

FRAME int tail_target(callback capture, int depth) {
    capture();
    return depth + sink;
}

FRAME int tail_caller(callback capture, int depth) {
    sink++;
    return tail_target(capture, depth); /* a jump at -O2 */
}

FRAME int tail_outer(callback capture, int depth) {
    int result = tail_caller(capture, depth);
    sink += result;
    return result;
}

#if defined(__aarch64__)
#define TRAP "brk #0"
/* Such a trap is met again after the signal's end, unless it is left behind. */
#define LEAVE_TRAP(context) ((ucontext_t *)(context))->uc_mcontext.pc += 4
#else
#define TRAP "int3"
#define LEAVE_TRAP(context) (void)(context)
#endif

FRAME void on_signal(int number, siginfo_t *info, void *context) {
    sink = number + info->si_signo;
    current();
    if (number == SIGTRAP)
        LEAVE_TRAP(context);
    sink++;
}

FRAME int interrupted(callback capture, int depth) {
    struct sigaction action, before;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO;
    current = capture;
    sigaction(SIGUSR2, &action, &before);
    /* A fault-like signal in the middle of this very function: the trap is not at a call. */
    pthread_kill(pthread_self(), SIGUSR2);
    sigaction(SIGUSR2, &before, 0);
    return sink + depth;
}

FRAME int trapped(callback capture, int depth) {
    struct sigaction action, before;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO;
    current = capture;
    sigaction(SIGTRAP, &action, &before);
    __asm__ volatile(TRAP);
    sigaction(SIGTRAP, &before, 0);
    return sink + depth;
}

static char other_stack[256 << 10] __attribute__((aligned(64)));

FRAME int on_other_signal_stack(callback capture, int depth) {
    stack_t alternative = {.ss_sp = other_stack, .ss_size = sizeof other_stack}, before_stack;
    struct sigaction action, before;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    current = capture;
    sigaltstack(&alternative, &before_stack);
    sigaction(SIGTRAP, &action, &before);
    __asm__ volatile(TRAP);
    sigaction(SIGTRAP, &before, 0);
    sigaltstack(&before_stack, 0);
    return sink + depth;
}

static ucontext_t main_context, coroutine_context;

FRAME void coroutine_body(int depth) {
    recurse(current, depth);
    sink++;
}

FRAME int coroutine(callback capture, int depth) {
    current = capture;
    getcontext(&coroutine_context);
    coroutine_context.uc_stack.ss_sp = other_stack;
    coroutine_context.uc_stack.ss_size = sizeof other_stack;
    coroutine_context.uc_link = &main_context;
    makecontext(&coroutine_context, (void (*)(void))coroutine_body, 1, depth);
    swapcontext(&main_context, &coroutine_context);
    return sink;
}

FRAME int coroutine_without_link(callback capture, int depth) {
    current = capture;
    getcontext(&coroutine_context);
    coroutine_context.uc_stack.ss_sp = other_stack;
    coroutine_context.uc_stack.ss_size = sizeof other_stack;
    coroutine_context.uc_link = 0;
    /* Never resumed, never returned from: it swaps back instead. */
    extern void coroutine_swapper(int);
    makecontext(&coroutine_context, (void (*)(void))coroutine_swapper, 1, depth);
    swapcontext(&main_context, &coroutine_context);
    return sink;
}

FRAME void coroutine_swapper(int depth) {
    recurse(current, depth);
    swapcontext(&coroutine_context, &main_context);
}

#ifndef WITHOUT_IFUNC
typedef int (*resolved)(int);
FRAME int resolved_to(int depth) { return depth + sink; }
FRAME resolved resolver(void) {
    if (current)
        current();
    sink++;
    return resolved_to;
}
int lazily(int depth) __attribute__((ifunc("resolver"), visibility("default")));

FRAME int lazy_binding(callback capture, int depth) {
    current = capture; /* the resolver runs in the dynamic loader, at the first call through the PLT */
    int result = lazily(depth);
    current = 0;
    return result + sink;
}
#endif

FRAME int hostile_expression(callback capture, int depth) {
    capture();
    return sink + depth;
}
