// ROUNDS: operator new and delete of the program's own. Compiled with one of these, its blocks are from
//   ARENA     a store of its own
//   LARGE     the same, in a program with more code than heapbpf scans
//   SHIM      the same, as are those of malloc, also under glibc's inner names, as in Chromium
//   THROWS    the same, with a new-handler and an exception where that is full
//   POINTER   the same, through pointers
//   WRAPPED   malloc, by a function that others may call, too: what is counted are the calls of malloc
// and of Firefox's interface, with MOZ.
#include <new>
extern "C" {
#include "truth.h"
}
#include <sys/mman.h>
static char *at, *end;
#define OWN __attribute__((noinline))
static void *take(size_t n) {
  n = (n + 15) & ~size_t{15};
  if (!at || n > (size_t)(end - at)) {
    void *made = mmap(0, 16 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return 0;
    at = (char *)made;
    end = at + (16 << 20);
  }
  at += n;
  return at - n;
}
static void give(void *p) { KEEP(p); }
#ifdef MOZ
extern "C" {
OWN void *moz_arena_malloc(size_t arena, size_t n) { KEEP(arena); return take(n); }
OWN void *moz_arena_calloc(size_t arena, size_t count, size_t n) { KEEP(arena); return take(count * n); }
OWN void *moz_arena_realloc(size_t arena, void *old, size_t n) { KEEP(arena); KEEP(old); return take(n); }
OWN void moz_arena_free(size_t arena, void *p) { KEEP(arena); give(p); }
SITE(00, moz_arena_malloc(1, n))
SITE(01, moz_arena_calloc(1, 2, n / 2))
}
static void drop(void *p) { moz_arena_free(1, p); }
#else
#ifdef WRAPPED
extern "C" OWN void *my_take(size_t n) { return malloc(n); }
extern "C" OWN void my_give(void *p) { free(p); }
#endif
#ifdef LARGE
__asm__(".section .text.large,\"ax\",@progbits\n.zero 0x4100000\n.text");
#endif
#ifdef SHIM
static void *sized(size_t n) {
  size_t *p = (size_t *)take(n + 16);
  if (p) *p = n;
  return p ? p + 2 : p;
}
extern "C" {
OWN void *malloc(size_t n) noexcept { return sized(n); }
OWN void *calloc(size_t count, size_t n) noexcept { return sized(count * n); }
OWN void *realloc(void *old, size_t n) noexcept {
  void *p = sized(n);
  size_t had = old ? ((size_t *)old)[-2] : 0;
  return p ? memcpy(p, old, had < n ? had : n) : p;
}
OWN void free(void *p) noexcept { give(p); }
void *__libc_malloc(size_t) __attribute__((alias("malloc")));
void *__libc_calloc(size_t, size_t) __attribute__((alias("calloc")));
void *__libc_realloc(void *, size_t) __attribute__((alias("realloc")));
void __libc_free(void *) __attribute__((alias("free")));
}
#endif
struct Functions { void *(*take)(size_t); void (*give)(void *); };
static Functions functions = {take, give};
static Functions *volatile through = &functions;
OWN void *operator new(size_t n) {
#if defined THROWS
  for (;;) {
    if (void *p = take(n)) return p;
    std::new_handler handler = std::get_new_handler();
    if (!handler) throw std::bad_alloc();
    handler();
  }
#elif defined POINTER
  return through->take(n);
#elif defined WRAPPED
  return my_take(n);
#else
  return take(n);
#endif
}
OWN void operator delete(void *p) noexcept {
#if defined POINTER
  through->give(p);
#elif defined WRAPPED
  my_give(p);
#else
  give(p);
#endif
}
OWN void operator delete(void *p, size_t) noexcept { operator delete(p); }
extern "C" {
SITE(00, ::operator new(n))
SITE(01, malloc(n))
}
static void drop(void *p) { ::operator delete(p); }
#endif
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 100);
  ready();
  for (uint64_t r = 0; r < rounds; r++) {
    void *p = site_00(1000); took(0, 1000);
    if (r % 2) { drop(p); gave(0, 1000); }
    p = site_01(400); took(1, 400);
#ifdef MOZ
    if (r % 3) { drop(p); gave(1, 400); }
#else
    if (r % 3) { free(p); gave(1, 400); }
#endif
  }
  report();
  return 0;
}
