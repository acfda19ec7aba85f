// ROUNDS [limit|refused]: the forms of operator new and delete, which go through malloc, and exceptions from those that
// fail because the address space, or a limit of the process, is exhausted; or, with refused, because the system gives no
// more memory for a reason that nobody else knows, which a handler of the program turns into an exception of its own.
#include <cstddef>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <new>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
extern "C" {
#include "truth.h"
}
static volatile size_t huge_bytes = ((size_t)1 << 47) - ((size_t)1 << 21); // more than any address space has left
extern "C" {
SITE(00, ::operator new(n))
SITE(01, ::operator new[](n))
SITE(02, ::operator new(n, std::nothrow))
SITE(03, ::operator new(n, std::align_val_t(64)))
}
// Not a site: the exception itself is allocated here.
NOINLINE static void throws() {
  try {
    void *p = ::operator new(huge_bytes);
    KEEP(p);
    die("an allocation that had to fail succeeded");
  } catch (const std::bad_alloc &) {
    truth->failed++;
  }
}
struct out_of_memory : std::bad_alloc {};
// From now on, mappings of 64 MiB and more are refused, and so is a heap (of brk) that grows by 16 MiB.
static void refuse_large_mappings() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 0, 2),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 64 << 20, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOMEM),
  };
  sock_fprog program = {sizeof filter / sizeof *filter, filter};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
    die("cannot refuse myself memory");
  uintptr_t beyond = ((uintptr_t)sbrk(0) + (16 << 20)) & ~(uintptr_t)4095;
  if (mmap((void *)beyond, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED)
    die("cannot end the heap");
}
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 200);
  if (argc > 2 && !strcmp(argv[2], "refused")) {
    std::set_new_handler([] { throw out_of_memory(); });
    refuse_large_mappings();
    huge_bytes = (size_t)512 << 20;
  } else if (argc > 2) {
    struct rlimit limit = {(rlim_t)4 << 30, (rlim_t)4 << 30};
    if (setrlimit(RLIMIT_AS, &limit)) die("cannot limit myself");
    huge_bytes = (size_t)4 << 30;
  }
  try { throw 1; } catch (int) {} // the first throw creates the unwinder's tables
  ready();
  for (uint64_t r = 0; r < rounds; r++) {
    void *p = site_00(100); took(0, 100);
    if (r % 10) { ::operator delete(p); gave(0, 100); }
    throws();
    p = site_01(200); took(1, 200);
    if (r % 10) { ::operator delete[](p); gave(1, 200); }
    p = site_02(300); took(2, 300);
    if (r % 10) { ::operator delete(p, (size_t)300); gave(2, 300); }
    p = site_03(384); took(3, 384); // a multiple of the alignment: libstdc++ rounds up
    if (r % 10) { ::operator delete(p, std::align_val_t(64)); gave(3, 384); }
  }
  report();
  return 0;
}
