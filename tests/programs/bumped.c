/* LIBRARY: allocates with libc's allocator and with that of a library (bumps.c), then unloads the library and loads it again. */
#include <dlfcn.h>
#include "truth.h"
static void *(*take)(size_t);
static void (*give)(void *);
SITE(00, malloc(n))
SITE(01, take(n))
SITE(02, take(n))
static void *load(const char *path) {
  void *library = dlopen(path, RTLD_NOW);
  if (!library) die("dlopen");
  *(void **)&take = dlsym(library, "bumps_take");
  *(void **)&give = dlsym(library, "bumps_give");
  if (!take || !give) die("dlsym");
  return library;
}
static void work(int site, void *(*allocate)(size_t)) {
  for (int i = 0; i < 100; i++) {
    void *p = site_00(300);
    took(0, 300);
    if (i % 2) { free(p); gave(0, 300); }
    p = allocate(400);
    took(site, 400);
    if (i % 4) { give(p); gave(site, 400); }
  }
}
int main(int argc, char **argv) {
  if (argc < 2) die("which library?");
  void *library = load(argv[1]);
  ready();
  work(1, site_01);
  dlclose(library);
  load(argv[1]);
  step();
  work(2, site_02);
  report();
  return 0;
}
