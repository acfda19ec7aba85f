/* KIND COUNT ROUNDS [DIR]: maps COUNT executable pages below its libraries, none next to another, and then allocates.
 * KIND: `code` (memory without a file), `data` (the same, but not executable), `pieces` (of its own file), `files` (each of
 * a new file in DIR). */
#include "truth.h"
#include <fcntl.h>
SITE(00, malloc(n))
static int new_file(const char *dir, uint64_t i) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%llu", dir, (unsigned long long)i);
  int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0700);
  if (fd < 0 || ftruncate(fd, 4096)) die("cannot make a file");
  return fd;
}
int main(int argc, char **argv) {
  const char *kind = argc > 1 ? argv[1] : "code";
  uint64_t count = argument(argc, argv, 2, 12000), rounds = argument(argc, argv, 3, 1000);
  const char *dir = argc > 4 ? argv[4] : "/tmp";
  /* Every other page stays inaccessible, so that the kernel does not merge the mappings. */
  char *space = mmap(0, count * 2 * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (space == MAP_FAILED) die("no space");
  int self = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  for (uint64_t i = 0; i < count; i++) {
    char *page = space + i * 2 * 4096;
    int is_data = !strcmp(kind, "data");
    if (is_data || !strcmp(kind, "code")) {
      if (mprotect(page, 4096, is_data ? PROT_READ : PROT_READ | PROT_EXEC)) die("mprotect");
      continue;
    }
    int fd = strcmp(kind, "files") ? self : new_file(dir, i);
    if (mmap(page, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_FIXED, fd, 0) == MAP_FAILED) die("mmap");
    if (fd != self) close(fd);
  }
  ready();
  for (uint64_t r = 0; r < rounds; r++) {
    size_t n = 1 + r % 3000;
    char *p = site_00(n);
    took(0, n);
    if (r % 2) { free(p); gave(0, n); }
  }
  report();
  return 0;
}
