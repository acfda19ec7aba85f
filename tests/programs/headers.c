/* A library to preload, like allocators that keep notes on each block: it asks the next allocator for 16 bytes more, and
 * returns what follows these. Blocks from before it was loaded have none. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
enum { HEADER = 16 };
static void *(*next_malloc)(size_t), *(*next_calloc)(size_t, size_t), *(*next_realloc)(void *, size_t);
static void (*next_free)(void *);
__attribute__((constructor)) static void begin(void) {
  next_malloc = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
  next_calloc = (void *(*)(size_t, size_t))dlsym(RTLD_NEXT, "calloc");
  next_realloc = (void *(*)(void *, size_t))dlsym(RTLD_NEXT, "realloc");
  next_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
}
static uintptr_t mark_of(void *block) { return (uintptr_t)block ^ 0x6865616465726564; }
static void *marked(void *block) {
  if (!block) return 0;
  *(uintptr_t *)block = mark_of(block);
  return (char *)block + HEADER;
}
static void *with_header(void *p) {
  char *block = (char *)p - HEADER;
  if (!p || *(uintptr_t *)block != mark_of(block)) return p;
  *(uintptr_t *)block = 0;
  return block;
}
void *malloc(size_t n) {
  if (!next_malloc) begin();
  return marked(next_malloc(n + HEADER));
}
void *calloc(size_t count, size_t size) {
  if (!next_calloc) begin();
  return marked(next_calloc(1, count * size + HEADER));
}
void *realloc(void *p, size_t n) {
  if (!next_realloc) begin();
  return marked(next_realloc(with_header(p), n + HEADER));
}
void free(void *p) {
  if (!next_free) begin();
  next_free(with_header(p));
}
