/* ROUNDS LIBRARY...: loads each library, calls the site in it, and unloads it. The next one may be mapped at the
 * same addresses. The loader's own allocations are not at any site. */
#include <dlfcn.h>
#include "truth.h"
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 5);
  ready();
  for (uint64_t r = 0; r < rounds; r++)
    for (int i = 2; i < argc; i++) {
      char name[] = "site_00";
      name[5] = (char)('0' + (10 + i - 2) / 10); name[6] = (char)('0' + (10 + i - 2) % 10);
      void *library = dlopen(argv[i], RTLD_NOW);
      if (!library) die("dlopen");
      void *(*site)(size_t);
      *(void **)&site = dlsym(library, name);
      if (!site) die("dlsym");
      for (int k = 0; k < 100; k++) {
        size_t n = 300 + 10 * (size_t)i;
        void *p = site(n); took(10 + i - 2, n);
        if (k % 5) { free(p); gave(10 + i - 2, n); }
      }
      dlclose(library);
    }
  report();
  return 0;
}
