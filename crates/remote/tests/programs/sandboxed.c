/* sandboxed filter|strict: calls the hooked function under a seccomp filter that kills for every call that it does not make
 * itself, or in strict mode. Ends on SIGTERM (filter) and prints OK. */
#include "hooked.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static volatile sig_atomic_t stop;
static void on_term(int signal) { (void)signal, stop = 1; }

int main(int count, char **arguments) {
  int strict = count > 1 && !strcmp(arguments[1], "strict");
  signal(SIGTERM, on_term);
  printf("READY %lx\n", (unsigned long)hooked), fflush(stdout);
  int allowed[] = {SYS_write, SYS_exit_group, SYS_rt_sigreturn, SYS_restart_syscall}, n = 0;
  struct sock_filter filter[20];
  filter[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0);
  for (int i = 0; i < 4; i++) {
    filter[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], 0, 1);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  }
  filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
  struct sock_fprog program = {n, filter};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  if (prctl(PR_SET_SECCOMP, strict ? SECCOMP_MODE_STRICT : SECCOMP_MODE_FILTER, strict ? 0 : &program)) return 2;
  if (write(1, "IN\n", 3) != 3) return 2;
  /* Strict mode forbids reading the time stamp counter, which the hooked function does. */
  while (strict) {}
  for (long i = 0; !stop; i++) if (hooked(i) != 3 * i + 7) _exit(3);
  if (write(1, "OK calls 1\n", 11) != 11) return 2;
  _exit(0);
}
