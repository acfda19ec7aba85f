/* ROUNDS: many functions of libc that call its allocator, from everywhere in its text. The number of calls and their sizes
 * are libc's own affair: what is compared is one way of hooking with another. */
#include <dirent.h>
#include <fcntl.h>
#include <locale.h>
#include <regex.h>
#include <search.h>
#include "truth.h"
static char text[600];
static int up(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }
NOINLINE void site_00(void) { char *p = strdup(text); KEEP(p); free(p); }
NOINLINE void site_01(void) { char *p = strndup(text, 200); KEEP(p); free(p); }
NOINLINE void site_02(void) { char *p = 0; if (asprintf(&p, "%0900d %s", 7, text) < 0) die("asprintf"); KEEP(p); free(p); }
NOINLINE void site_03(void) {
  char *p = 0; size_t n = 0;
  FILE *f = fopen("/etc/passwd", "r");
  if (!f) die("fopen");
  while (getline(&p, &n, f) >= 0) {}
  KEEP(p);
  free(p);
  fclose(f);
}
NOINLINE void site_04(void) {
  char *p = 0; size_t n = 0;
  FILE *f = open_memstream(&p, &n);
  for (int i = 0; i < 100; i++) fputs(text, f);
  fclose(f);
  free(p);
}
NOINLINE void site_05(void) { DIR *d = opendir("/etc"); while (readdir(d)) {} closedir(d); }
NOINLINE void site_06(void) {
  static int many[20000];
  for (int i = 0; i < 20000; i++) many[i] = (i * 7919) % 20000;
  qsort(many, 20000, sizeof *many, up);
}
NOINLINE void site_07(void) { char *p = realpath("/usr/../usr/../usr", 0); KEEP(p); free(p); }
NOINLINE void site_08(void) { char *p = getcwd(0, 0); KEEP(p); free(p); }
NOINLINE void site_09(void) {
  regex_t r;
  if (regcomp(&r, "(a|b)*c[[:alpha:]]+", REG_EXTENDED)) die("regcomp");
  regexec(&r, "xababcdef", 0, 0, 0);
  regfree(&r);
}
NOINLINE void site_10(void) {
  static int keys[50];
  void *root = 0;
  for (int i = 0; i < 50; i++) { keys[i] = i; tsearch(&keys[i], &root, up); }
  for (int i = 0; i < 50; i++) tdelete(&keys[i], &root, up);
}
NOINLINE void site_11(void) { setenv("HEAPBPF_TEST", text, 1); unsetenv("HEAPBPF_TEST"); }
NOINLINE void site_12(void) {
  struct dirent **names;
  int n = scandir("/etc", &names, 0, alphasort);
  for (int i = 0; i < n; i++) free(names[i]);
  free(names);
}
NOINLINE void site_13(void) { locale_t l = newlocale(LC_ALL_MASK, "C.UTF-8", 0); if (l) freelocale(l); }
NOINLINE void site_14(void) { FILE *p = popen("true", "r"); if (!p) die("popen"); pclose(p); }
NOINLINE void site_15(void) { char *p = reallocarray(0, 10, 30); KEEP(p); p = reallocarray(p, 20, 30); KEEP(p); free(p); }
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 10);
  memset(text, 'x', sizeof text - 1);
  ready();
  for (uint64_t r = 0; r < rounds; r++) {
    site_00(); site_01(); site_02(); site_03(); site_04(); site_05(); site_06(); site_07();
    site_08(); site_09(); site_10(); site_11(); site_12(); site_13(); site_14(); site_15();
  }
  report();
  return 0;
}
