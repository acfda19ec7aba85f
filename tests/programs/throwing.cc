// ROUNDS [limit]: the forms of operator new and delete, which go through malloc, and exceptions from those that fail
// because the address space, or a limit of the process, is exhausted.
#include <new>
#include <sys/resource.h>
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
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 200);
  if (argc > 2) {
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
