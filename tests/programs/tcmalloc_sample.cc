// Preloaded with tcmalloc: writes the heap that its sampler knows to the file named by TCMALLOC_SAMPLE_OUT, at the end of
// the process. (tcmalloc has a variable that begins sampling, but none that writes what was sampled.)
#include <cstdlib>
#include <fstream>
#include <string>

#include <gperftools/malloc_extension.h>

__attribute__((destructor)) static void write_sample() {
  const char *name = getenv("TCMALLOC_SAMPLE_OUT");
  if (!name) return;
  std::string text;
  MallocExtension::instance()->GetHeapSample(&text);
  std::ofstream(name) << text;
}
