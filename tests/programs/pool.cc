// ROUNDS [late]: a C++ pool that gets its chunks from malloc. Its functions sometimes throw, whatever the request.
// After a throw, memory comes from malloc: at once, or from functions further down the stack.
#include <new>
extern "C" {
#include "truth.h"
}
static char *chunk, *chunk_end;
static uint64_t calls;
struct denied { uint64_t call; };
extern "C" {
NOINLINE void *pool_take(size_t size) {
  if (++calls % 3 == 0) throw denied{calls};
  size_t whole = (size + 31) & ~(size_t)15;
  if ((size_t)(chunk_end - chunk) < whole) {
    chunk = (char *)malloc(1 << 16);
    if (!chunk) return nullptr;
    chunk_end = chunk + (1 << 16);
  }
  char *block = chunk + 16;
  *(size_t *)chunk = size;
  chunk += whole;
  return block;
}
// Throws before it has done anything, so the old block stays allocated.
NOINLINE void *pool_grow(void *old, size_t size) {
  void *block = pool_take(size);
  size_t was = *(size_t *)((char *)old - 16);
  memcpy(block, old, was < size ? was : size);
  return block;
}
NOINLINE void pool_give(void *block) { KEEP(block); }
SITE(00, pool_take(n))
SITE(01, malloc(n))
SITE(02, malloc(n))
}
static void *grown_from;
extern "C" { SITE(03, pool_grow(grown_from, n)) }
NOINLINE static void *deeper(int depth, size_t n) {
  void *p = depth ? deeper(depth - 1, n) : site_02(n);
  KEEP(p);
  return p;
}
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 200);
  try { throw 1; } catch (int) {} // the first throw creates the unwinder's tables
  ready();
  for (uint64_t r = 0; r < rounds; r++) {
    void *p;
    try {
      p = site_00(100); took(0, 100);
    } catch (const denied &) {
      truth->failed++;
      if (r % 2) { p = site_01(100); took(1, 100); }
      else { p = deeper(3, 200); took(2, 200); }
      continue;
    }
    if (r % 5 == 0) continue;
    grown_from = p;
    try {
      p = site_03(300); gave(0, 100); took(3, 300);
      if (r % 2) { pool_give(p); gave(3, 300); }
    } catch (const denied &) {
      truth->failed++;
      if (r % 2) { pool_give(p); gave(0, 100); }
    }
  }
  report();
  return 0;
}
