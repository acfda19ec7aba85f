/* MODE ROUNDS: allocates at three sites, in a state in which inline hooks may be impossible.
 * kill, errno: a seccomp filter ends it for mremap, or refuses mremap; the program itself never calls it.
 * sealed: it may not make memory executable (PR_SET_MDWE). undumpable: it may not be dumped.
 * patched: the byte before malloc is changed in memory, which is padding between functions. */
#include "truth.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#ifndef PR_SET_MDWE
#define PR_SET_MDWE 65
#endif
SITE(00, malloc(n)) SITE(01, calloc(1, n)) SITE(02, realloc(0, n))

static void filter_mremap(unsigned answer) {
  struct sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mremap, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, answer),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {4, filter};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
    die("cannot install the filter");
}
static void patch(void) {
  const unsigned char *at = (const unsigned char *)dlsym(RTLD_DEFAULT, "malloc") - 1;
  if (*at != 0 && *at != 0x90 && *at != 0xcc) die("no padding before malloc");
  unsigned char other = *at ^ 0x55;
  int memory = open("/proc/self/mem", O_RDWR);
  if (memory < 0 || pwrite(memory, &other, 1, (off_t)(uintptr_t)at) != 1 || *at != other) die("cannot change the code");
  close(memory);
}
int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "";
  uint64_t rounds = argument(argc, argv, 2, 1000);
  if (!strcmp(mode, "kill")) filter_mremap(SECCOMP_RET_KILL_PROCESS);
  if (!strcmp(mode, "errno")) filter_mremap(SECCOMP_RET_ERRNO | ENOSYS);
  if (!strcmp(mode, "sealed") && prctl(PR_SET_MDWE, 1, 0, 0, 0)) die("this kernel does not know PR_SET_MDWE");
  if (!strcmp(mode, "undumpable") && prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)) die("cannot forbid dumps");
  if (!strcmp(mode, "patched")) patch();
  ready();
  void *kept[3] = {0};
  for (uint64_t i = 0; i < rounds; i++) {
    void *(*const site[3])(size_t) = {site_00, site_01, site_02};
    for (int s = 0; s < 3; s++) {
      size_t size = 40 + 16 * ((i + (uint64_t)s) % 50);
      void *p = site[s](size);
      took(s, size);
      if (i == 0) { kept[s] = p; continue; }
      free(p);
      gave(s, size);
    }
  }
  KEEP(kept[0]);
  report();
  return 0;
}
