/* ROUNDS: allocations below inlined calls of C++ functions, whose names are mangled. */
#include "truth.h"
SITE(00, malloc(n)) SITE(01, malloc(n))

namespace shop {
static inline __attribute__((always_inline)) void *wraps(size_t n) {
  void *p = site_00(n);
  KEEP(p);
  return p;
}
template <typename T> struct Box {
  inline __attribute__((always_inline)) T *fills() {
    return (T *)wraps(sizeof(T) * 4);
  }
};
NOINLINE void sells(int kind) {
  Box<long> box;
  void *p = kind ? (void *)box.fills() : site_01(48);
  took(kind ? 0 : 1, kind ? 32 : 48);
  KEEP(p);
}
} // namespace shop

int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 100);
  ready();
  for (uint64_t k = 0; k < rounds; k++) shop::sells(k % 2);
  report();
  return 0;
}
