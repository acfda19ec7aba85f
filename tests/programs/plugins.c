/* ROUNDS LIBRARY...: loads each library, calls the site in it, and unloads it. The next one may be mapped at the
 * same addresses. The loader's own allocations are not at any site.
 *   deleted DIR LIBRARY...  loads a copy of each library in the directory, deletes the copy, calls the site in it,
 *                           prints STEP and waits, and unloads it */
#include <dlfcn.h>
#include <fcntl.h>
#include "truth.h"
/* Copies a file without allocating. */
static void copy(const char *from, const char *to) {
  static char bytes[1 << 16];
  ssize_t k;
  int in = open(from, O_RDONLY), out = open(to, O_CREAT | O_WRONLY | O_EXCL, 0755);
  while ((k = read(in, bytes, sizeof bytes)) > 0)
    if (write(out, bytes, (size_t)k) != k) die("write");
  if (k < 0 || close(in) || close(out)) die("copy");
}
/* Loads a library, calls its site, and unloads it; `copied`: it is a copy that is to be deleted. */
static void use(const char *path, int i, int copied) {
  char name[] = "site_00";
  name[5] = (char)('0' + i / 10); name[6] = (char)('0' + i % 10);
  void *library = dlopen(path, RTLD_NOW);
  if (!library) die("dlopen");
  if (copied && unlink(path)) die("unlink");
  void *(*site)(size_t);
  *(void **)&site = dlsym(library, name);
  if (!site) die("dlsym");
  for (int k = 0; k < 100; k++) {
    size_t n = 100 + 20 * (size_t)i;
    void *p = site(n); took(i, n);
    if (k % 5) { free(p); gave(i, n); }
  }
  if (copied) step();
  dlclose(library);
}
int main(int argc, char **argv) {
  int copied = argc > 2 && !strcmp(argv[1], "deleted");
  uint64_t rounds = copied ? 1 : argument(argc, argv, 1, 5);
  ready();
  for (uint64_t r = 0; r < rounds; r++)
    for (int at = 2 + copied; at < argc; at++) {
      int i = 10 + at - 2 - copied;
      char path[4096];
      if (copied) {
        snprintf(path, sizeof path, "%s/plugin%d.so", argv[2], i);
        copy(argv[at], path);
      }
      use(copied ? path : argv[at], i, copied);
    }
  report();
  return 0;
}
