/* A plugin that is linked with an allocator of its own. Where it is opened with RTLD_DEEPBIND, its calls go there. */
#include <stdlib.h>
void *(*const plugin_bound)(size_t) = malloc;
void *plugin_malloc(size_t n) {
  void *p = malloc(n);
  __asm__ volatile("" : "+r"(p) : : "memory");
  return p;
}
void plugin_free(void *p) { free(p); }
