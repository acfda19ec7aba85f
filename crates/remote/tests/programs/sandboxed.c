/* sandboxed MODE: calls the hooked function under a seccomp filter that allows the calls that it makes itself, and answers all
 * others as the mode says. `strict` is strict mode. `executable` kills for executable mappings alone, `return` lets only
 * rt_sigreturn fail. `restart` has another thread sleep under a filter that kills for restart_syscall. `later` confines itself
 * on SIGUSR1. `dispatch` handles its own system calls (Syscall User Dispatch): all are let through until SIGUSR1, and the
 * next one gets SIGSYS. Ends on SIGTERM and prints OK. */
#include "hooked.h"
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t stop, confine;
/* Read by the kernel at each system call: 0 lets it through. */
static volatile char catches;
static void on_term(int signal) { (void)signal, stop = 1; }
static void on_usr1(int signal) { (void)signal, confine = 1; }

static struct sock_filter filter[40];
static int n;
static void add(int code, int jt, int jf, unsigned k) { filter[n++] = (struct sock_filter){code, jt, jf, k}; }
static void answer(int number, unsigned action) {
  add(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, number), add(BPF_RET | BPF_K, 0, 0, action);
}
static int install(unsigned flags) {
  struct sock_fprog program = {n, filter};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program) < 0;
}
/* Allows what this program does itself. */
static int only(unsigned otherwise, unsigned flags) {
  int allowed[] = {SYS_write, SYS_exit_group, SYS_rt_sigreturn, SYS_clock_nanosleep};
  add(BPF_LD | BPF_W | BPF_ABS, 0, 0, 0);
  for (int i = 0; i < 4; i++) answer(allowed[i], SECCOMP_RET_ALLOW);
  add(BPF_RET | BPF_K, 0, 0, otherwise);
  return install(flags);
}
static void *sleeper(void *unused) {
  (void)unused;
  if (only(SECCOMP_RET_KILL_PROCESS, 0) || write(1, "IN\n", 3) != 3) _exit(2);
  for (;;) clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){10, 0}, 0);
}

int main(int count, char **arguments) {
  const char *mode = count > 1 ? arguments[1] : "";
  int is_strict = !strcmp(mode, "strict"), is_later = !strcmp(mode, "later");
  signal(SIGTERM, on_term), signal(SIGUSR1, on_usr1);
  printf("READY %lx\n", (unsigned long)hooked), fflush(stdout);
  struct { const char *mode; unsigned action; } modes[] = {
    {"kill", SECCOMP_RET_KILL_PROCESS}, {"kill_thread", SECCOMP_RET_KILL_THREAD}, {"trap", SECCOMP_RET_TRAP},
    {"errno", SECCOMP_RET_ERRNO | 1}, {"log", SECCOMP_RET_LOG}, {"trace", SECCOMP_RET_TRACE},
    {"notify", SECCOMP_RET_USER_NOTIF}};
  int failed = 0;
  for (int i = 0; i < 7; i++) {
    int listens = modes[i].action == SECCOMP_RET_USER_NOTIF;
    if (!strcmp(mode, modes[i].mode)) failed = only(modes[i].action, listens ? SECCOMP_FILTER_FLAG_NEW_LISTENER : 0);
  }
  if (!strcmp(mode, "executable")) {
    add(BPF_LD | BPF_W | BPF_ABS, 0, 0, 0);
    add(BPF_JMP | BPF_JEQ | BPF_K, 0, 3, SYS_mmap);
    add(BPF_LD | BPF_W | BPF_ABS, 0, 0, 32);
    add(BPF_JMP | BPF_JSET | BPF_K, 0, 1, PROT_EXEC);
    add(BPF_RET | BPF_K, 0, 0, SECCOMP_RET_KILL_PROCESS);
    add(BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW);
    failed = install(0);
  }
  if (!strcmp(mode, "return")) {
    add(BPF_LD | BPF_W | BPF_ABS, 0, 0, 0);
    answer(SYS_rt_sigreturn, SECCOMP_RET_ERRNO | 1);
    add(BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW);
    failed = install(0);
  }
  if (!strcmp(mode, "dispatch")) failed = prctl(59 /* PR_SET_SYSCALL_USER_DISPATCH */, 1L, 0L, 0L, &catches);
  if (is_strict) failed = prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT, 0, 0, 0);
  if (failed) return 2;
  pthread_t thread;
  if (!strcmp(mode, "restart")) pthread_create(&thread, 0, sleeper, 0);
  else if (!is_later && write(1, "IN\n", 3) != 3) return 2;
  /* Strict mode forbids reading the time stamp counter, which the hooked function does. */
  while (is_strict) {}
  for (long i = 0; !stop; i++) {
    if (hooked(i) != 3 * i + 7) _exit(3);
    if (confine && !strcmp(mode, "dispatch")) {
      catches = 1;
      _exit(write(1, "LOST\n", 5));
    }
    if (confine && is_later) {
      is_later = 0;
      if (only(SECCOMP_RET_KILL_PROCESS, 0) || write(1, "IN\n", 3) != 3) _exit(2);
    }
  }
  if (write(1, "OK calls 1\n", 11) != 11) return 2;
  _exit(0);
}
