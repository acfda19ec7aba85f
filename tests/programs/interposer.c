/* A library to preload, like memory checkers and tracers: its malloc and free call the next ones. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
static void *(*next_malloc)(size_t);
static void (*next_free)(void *);
static unsigned long calls;
__attribute__((constructor)) static void begin(void) {
  next_malloc = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
  next_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
}
void *malloc(size_t n) {
  if (!next_malloc) begin();
  calls++;
  return next_malloc(n);
}
void free(void *p) {
  if (!next_free) begin();
  calls++;
  next_free(p);
}
