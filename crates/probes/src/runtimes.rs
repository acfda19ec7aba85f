//! Language runtimes with their own heaps. No probe on an allocator sees the objects there, and users who look for them
//! need to be told.
//!
//! Runtimes are recognised by what their files cannot do without: sections that their compilers make, functions that
//! they export, and finally the file's name. A statically linked and stripped runtime may go unnoticed.

use heapbpf_audit::Missing;

use crate::elf::FileImage;

/// A runtime with its own heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Runtime {
    /// Java: HotSpot, OpenJ9, or a native image.
    Java,
    /// JavaScript: V8, as in Chromium and Node.js.
    V8,
    /// Go.
    Go,
    /// .NET: CoreCLR, or ahead of time.
    DotNet,
    /// .NET: Mono.
    Mono,
    /// PHP: the Zend engine.
    Php,
    /// Python: CPython.
    Python,
    /// Ruby: CRuby.
    Ruby,
    /// Erlang and Elixir: BEAM.
    Erlang,
    /// Common Lisp: SBCL.
    Sbcl,
    /// OCaml.
    OCaml,
    /// Haskell: GHC.
    Ghc,
    /// memcached's items.
    Memcached,
    /// Lua: LuaJIT.
    LuaJit,
    /// MySQL's and MariaDB's cache of tables.
    InnoDb,
    /// Virtual machines: QEMU's system emulators.
    Qemu,
}

impl Runtime {
    /// All runtimes.
    pub const ALL: [Self; 16] = [
        Self::Java,
        Self::V8,
        Self::Go,
        Self::DotNet,
        Self::Mono,
        Self::Php,
        Self::Python,
        Self::Ruby,
        Self::Erlang,
        Self::Sbcl,
        Self::OCaml,
        Self::Ghc,
        Self::Memcached,
        Self::LuaJit,
        Self::InnoDb,
        Self::Qemu,
    ];

    /// The heap that is not included, such as `Java's own heap`.
    #[must_use]
    pub const fn heap(self) -> &'static str {
        match self {
            Self::Java => "Java's own heap",
            Self::V8 => "V8's own heap (JavaScript)",
            Self::Go => "Go's own heap",
            Self::DotNet => ".NET's own heap",
            Self::Mono => "Mono's own heap",
            Self::Php => "PHP's own heap (Zend)",
            Self::Python => "Python's own heap (objects up to 512 bytes)",
            Self::Ruby => "Ruby's own heap (object slots)",
            Self::Erlang => "Erlang's own heap",
            Self::Sbcl => "SBCL's own heap (dynamic space)",
            Self::OCaml => "OCaml's own heap",
            Self::Ghc => "GHC's own heap (Haskell)",
            Self::Memcached => "memcached's own heap (slabs of items)",
            Self::LuaJit => "LuaJIT's own heap",
            Self::InnoDb => "InnoDB's own heap (buffer pool)",
            Self::Qemu => "QEMU's own heap (memory of the guest)",
        }
    }

    /// Why it is not included, and which tool shows it.
    #[must_use]
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Java => "its objects are not allocated with malloc; `jcmd PID GC.class_histogram` and JFR show them",
            Self::V8 => {
                "its objects are not allocated with malloc; heap snapshots (`--heapsnapshot-signal`, DevTools) show \
                 them"
            }
            Self::Go => {
                "the runtime's own samples are read at snapshots, while it runs and if frees are tracked, and that \
                 was not done; net/http/pprof shows them too"
            }
            Self::DotNet => "its objects are not allocated with malloc; dotnet-gcdump shows them",
            Self::Mono => "its objects are not allocated with malloc; `mono --profile=log:heapshot` shows them",
            Self::Php => {
                "its arenas come from mmap, and allocations inside them are not seen; with USE_ZEND_ALLOC=0 in its \
                 environment PHP calls malloc instead"
            }
            Self::Python => {
                "its arenas come from mmap, and probes see allocations inside them only with --python-objects; with \
                 PYTHONMALLOC=malloc in its environment Python calls malloc instead"
            }
            Self::Ruby => {
                "object slots are in pages that come from mmap, while the memory that objects point to comes from \
                 malloc and is included; `ObjectSpace.trace_object_allocations` shows objects"
            }
            Self::Erlang => "its own allocators get memory from mmap; `erlang:memory()` and `recon_alloc` show it",
            Self::Sbcl => "its objects are not allocated with malloc; `(room)` shows them",
            Self::OCaml => {
                "its collector gets memory from mmap or in large chunks, not per object; `Gc.stat` and statmemprof \
                 show it"
            }
            Self::Ghc => "its collector gets memory from mmap in large blocks, not per object; `+RTS -hT` shows it",
            Self::Memcached => "items are in slabs of 1 MiB and are not tracked one by one; `stats slabs` shows them",
            Self::LuaJit => "its objects are not allocated with malloc; `collectgarbage('count')` shows their size",
            Self::InnoDb => "its pages come from mmap; `SHOW ENGINE INNODB STATUS` shows them",
            Self::Qemu => "it comes from mmap; the guest's own tools show what it is used for",
        }
    }

    /// What is missing for a process that runs it.
    #[must_use]
    pub fn missing(self) -> Missing {
        Missing::new(self.heap(), format!("not included, as {}", self.advice()))
    }

    /// The runtime in a file, if there is one.
    #[must_use]
    pub fn of(image: &FileImage) -> Option<Self> {
        image.runtime_by_section.or_else(|| Self::of_functions(image)).or_else(|| Self::of_name(image))
    }

    /// The runtime whose compiler makes a section of this name.
    pub(crate) fn of_section(name: &str) -> Option<Self> {
        match name {
            ".go.buildinfo" | ".gopclntab" => Some(Self::Go),
            // A native image contains its first heap.
            ".svm_heap" => Some(Self::Java),
            // Ahead-of-time compiled .NET.
            "__managedcode" => Some(Self::DotNet),
            _ => None,
        }
    }

    /// The first runtime in the order of the enum: a browser may contain a Python interpreter, but not the reverse.
    fn of_functions(image: &FileImage) -> Option<Self> {
        image.functions().filter_map(|(name, _)| Self::of_function(name)).min()
    }

    fn of_function(name: &str) -> Option<Self> {
        match name {
            "JVM_MaxMemory" | "JVM_TotalMemory" | "graal_create_isolate" => Some(Self::Java),
            "coreclr_initialize" => Some(Self::DotNet),
            "mono_jit_init" | "mono_gc_collect" => Some(Self::Mono),
            "_emalloc" | "zend_mm_alloc" | "_zend_mm_alloc" => Some(Self::Php),
            "PyObject_Malloc" | "_PyObject_Malloc" | "_PyEval_EvalFrameDefault" => Some(Self::Python),
            "ruby_init" | "rb_gc_start" => Some(Self::Ruby),
            "caml_alloc_string" | "caml_alloc_shr" => Some(Self::OCaml),
            "hs_init_ghc" => Some(Self::Ghc),
            "luaJIT_setmode" => Some(Self::LuaJit),
            // v8::Isolate::New, and the same function in the bindings for Rust.
            "v8__Isolate__New" => Some(Self::V8),
            name if name.starts_with("_ZN2v87Isolate3New") => Some(Self::V8),
            _ => None,
        }
    }

    /// Recognises a runtime by the name of the library or program. Browsers export nothing that identifies them.
    fn of_name(image: &FileImage) -> Option<Self> {
        let of_path = image.path.rsplit('/').next().unwrap_or(&image.path);
        [image.soname.as_deref().unwrap_or(""), of_path].into_iter().find_map(|name| {
            let begins = |with: &str| name.strip_prefix(with).is_some_and(|rest| rest.starts_with(['.', '-']));
            match name {
                "libjvm.so" => Some(Self::Java),
                "libcoreclr.so" => Some(Self::DotNet),
                "libmonosgen-2.0.so" => Some(Self::Mono),
                "chrome" | "chromium" | "chromium-browser" | "msedge" | "brave" | "electron" | "node" | "nodejs" => {
                    Some(Self::V8)
                }
                "beam.smp" => Some(Self::Erlang),
                "sbcl" => Some(Self::Sbcl),
                "memcached" => Some(Self::Memcached),
                "mariadbd" | "mysqld" => Some(Self::InnoDb),
                _ if begins("qemu-system") => Some(Self::Qemu),
                _ if begins("libv8") || begins("libnode") => Some(Self::V8),
                _ => None,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use heapbpf_testing::skipped;

    /// Makes a library from a C source with these commands.
    fn library(source: &str, name: &str, commands: &[&str]) -> Option<FileImage<'static>> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("source.c"), source).unwrap();
        for command in commands {
            let run = std::process::Command::new("sh").args(["-c", command]).current_dir(dir.path()).output().unwrap();
            if !run.status.success() {
                skipped(format_args!("{command}: {}", String::from_utf8_lossy(&run.stderr)));
                return None;
            }
        }
        let bytes = std::fs::read(dir.path().join("file")).unwrap();
        let path = Path::new("/somewhere").join(name);
        Some(FileImage::read_if(Box::leak(Box::new(bytes)), &path.display().to_string(), |_| false).unwrap())
    }

    #[test]
    fn a_runtime_is_known_by_what_it_exports_even_if_stripped() {
        for (function, runtime) in [
            ("JVM_MaxMemory", Runtime::Java),
            ("coreclr_initialize", Runtime::DotNet),
            ("_emalloc", Runtime::Php),
            ("PyObject_Malloc", Runtime::Python),
            ("ruby_init", Runtime::Ruby),
            ("caml_alloc_string", Runtime::OCaml),
            ("hs_init_ghc", Runtime::Ghc),
            ("luaJIT_setmode", Runtime::LuaJit),
            ("_ZN2v87Isolate3NewERKNS0_12CreateParamsE", Runtime::V8),
        ] {
            let source = format!("void *{function}(long n) {{ return (void *)n; }}");
            let commands = ["cc -O1 -fPIC -shared source.c -o file && strip file"];
            let Some(image) = library(&source, "libany.so", &commands) else { return };
            assert_eq!(Runtime::of(&image), Some(runtime), "{function}");
        }
        // A file that only calls the function is not recognised.
        let source = "void *PyObject_Malloc(long); void *f(void) { return PyObject_Malloc(1); }";
        let Some(image) = library(source, "module.so", &["cc -O1 -fPIC -shared source.c -o file"]) else { return };
        assert_eq!(Runtime::of(&image), None);
    }

    #[test]
    fn a_runtime_is_known_by_its_sections_or_by_its_name() {
        let empty = "int x;";
        let with = |section: &str| {
            format!("cc -shared source.c -o file && echo x > x && objcopy --add-section {section}=x file && strip file")
        };
        for (section, runtime) in
            [(".gopclntab", Runtime::Go), (".svm_heap", Runtime::Java), ("__managedcode", Runtime::DotNet)]
        {
            let Some(image) = library(empty, "program", &[&with(section)]) else { return };
            assert_eq!(Runtime::of(&image), Some(runtime), "{section}");
        }
        for (name, runtime) in [
            ("libjvm.so", Some(Runtime::Java)),
            ("chrome", Some(Runtime::V8)),
            ("libnode.so.108", Some(Runtime::V8)),
            ("libv8.so", Some(Runtime::V8)),
            ("beam.smp", Some(Runtime::Erlang)),
            ("sbcl", Some(Runtime::Sbcl)),
            ("memcached", Some(Runtime::Memcached)),
            ("mariadbd", Some(Runtime::InnoDb)),
            ("qemu-system-x86_64", Some(Runtime::Qemu)),
            ("qemu-x86_64", None),
            ("libv8x.so", None),
            ("python3", None),
            ("chromed", None),
        ] {
            let Some(image) = library(empty, name, &["cc -shared source.c -o file"]) else { return };
            assert_eq!(Runtime::of(&image), runtime, "{name}");
        }
    }

    #[test]
    fn each_says_what_is_missed_and_what_shows_it() {
        for runtime in Runtime::ALL {
            let Missing { what, why } = runtime.missing();
            assert!(
                what.contains("own heap") && why.starts_with("not included, as ") && why.contains("; "),
                "{what} {why}"
            );
        }
    }
}
