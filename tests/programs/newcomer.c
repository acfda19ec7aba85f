/* LIBRARY: loads a library that contains its own allocator, waits (STEP), then allocates with it and with malloc. Built
 * with DEEP: the library is deep_plugin.c. */
#include <dlfcn.h>
#include "truth.h"
static void *(*own_malloc)(size_t);
static void (*own_free)(void *);
#ifdef DEEP
enum { FLAGS = RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND };
static const char *const names[] = {"plugin_malloc", "plugin_free"};
#else
enum { FLAGS = RTLD_NOW | RTLD_LOCAL };
static const char *const names[] = {"malloc", "free"};
#endif
SITE(00, malloc(n))
SITE(01, own_malloc(n))
int main(int argc, char **argv) {
  ready();
  for (int i = 0; i < 100; i++) { void *p = site_00(100); took(0, 100); if (i % 2) { free(p); gave(0, 100); } }
  void *library = dlopen(argc > 1 ? argv[1] : "", FLAGS);
  if (!library) die(dlerror());
  *(void **)&own_malloc = dlsym(library, names[0]);
  *(void **)&own_free = dlsym(library, names[1]);
  void *(**bound)(size_t) = (void *(**)(size_t))dlsym(library, "plugin_bound");
  if (!own_malloc || !own_free || (bound ? *bound : own_malloc) == malloc) die("the library has no malloc of its own");
  own_free(own_malloc(1));
  step();
  for (int i = 0; i < 100; i++) {
    void *p = site_01(200); took(1, 200); if (i % 4) { own_free(p); gave(1, 200); }
    p = site_00(100); took(0, 100); if (i % 2) { free(p); gave(0, 100); }
  }
  report();
  return 0;
}
