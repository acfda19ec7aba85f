// ROUNDS [REST]: every form of operator new and operator delete, one site for each form of new. One block in four stays. With
// REST, only those of site_05 do, and the program rests for so many microseconds after each 100 rounds.
#include <new>
extern "C" {
#include "truth.h"
}
constexpr std::align_val_t line{64};
extern "C" {
SITE(00, ::operator new(n))
SITE(01, ::operator new[](n))
SITE(02, ::operator new(n, std::nothrow))
SITE(03, ::operator new[](n, std::nothrow))
SITE(04, ::operator new(n, line))
SITE(05, ::operator new[](n, line))
SITE(06, ::operator new(n, line, std::nothrow))
SITE(07, ::operator new[](n, line, std::nothrow))
}
static void *take(void *(*site)(size_t), int number, size_t n) {
  void *p = site(n);
  if (!p) die("an allocation failed");
  took(number, n);
  return p;
}
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 100), rest = argument(argc, argv, 2, 0);
  ready();
  for (uint64_t r = 0; r < rounds; r++) {
    bool leaks = r % 4 == 0, keep = leaks && !rest;
    if (rest && r % 100 == 0) {
      struct timespec length = {0, (long)rest * 1000};
      nanosleep(&length, nullptr);
    }
    void *p = take(site_00, 0, 100);
    if (!keep) { if (r % 2) ::operator delete(p); else ::operator delete(p, (size_t)100); gave(0, 100); }
    p = take(site_01, 1, 200);
    if (!keep) { if (r % 2) ::operator delete[](p); else ::operator delete[](p, (size_t)200); gave(1, 200); }
    p = take(site_02, 2, 300);
    if (!keep) { ::operator delete(p, std::nothrow); gave(2, 300); }
    p = take(site_03, 3, 400);
    if (!keep) { ::operator delete[](p, std::nothrow); gave(3, 400); }
    // Multiples of the alignment: libstdc++ rounds up before it calls aligned_alloc.
    p = take(site_04, 4, 512);
    if (!keep) { if (r % 2) ::operator delete(p, line); else ::operator delete(p, (size_t)512, line); gave(4, 512); }
    p = take(site_05, 5, 640);
    if (!leaks) { if (r % 2) ::operator delete[](p, line); else ::operator delete[](p, (size_t)640, line); gave(5, 640); }
    p = take(site_06, 6, 704);
    if (!keep) { ::operator delete(p, line, std::nothrow); gave(6, 704); }
    p = take(site_07, 7, 768);
    if (!keep) { ::operator delete[](p, line, std::nothrow); gave(7, 768); }
  }
  report();
  return 0;
}
