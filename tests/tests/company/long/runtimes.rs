//! Programs of runtimes whose objects no allocator's function hands out: doctor and the profile name the runtime, and the
//! report says how much memory may be its heap.

use std::process::Command;

use heapbpf_tests::doctor::{doctor_of, doctor_text_of};
use heapbpf_tests::environment::{skipped, tool_or_install, turn};
use heapbpf_tests::output;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use serde_json::Value;

/// Stands for the path of the file with [`OCAML`].
const FILE: &str = "FILE";
/// What each program keeps has at least this many bytes.
const KEPT_BYTES: u64 = 16 << 20;

const OCAML: &str = r#"let kept = List.init 1_000_000 (fun i -> i)
let () = print_endline "READY 1"; ignore (read_line ()); print_int (List.length kept)
"#;

/// A program of a runtime that keeps many objects, prints READY, and waits for a line.
struct Program {
    name: &'static str,
    /// Debian's package.
    package: &'static str,
    arguments: &'static [&'static str],
    /// What the heap is called.
    heap: &'static str,
    /// Part of the resident memory that has it.
    part: &'static str,
}

const PROGRAMS: [Program; 6] = [
    Program {
        name: "ruby",
        package: "ruby",
        arguments: &[
            "-e",
            r#"kept = (1..600_000).map { |i| [i, i + 1] }; $stdout.sync = true; puts "READY 1"; gets; puts kept.size"#,
        ],
        heap: "Ruby's own heap",
        part: "other",
    },
    Program {
        name: "erl",
        package: "erlang-base",
        arguments: &[
            "-noshell",
            "-eval",
            r#"Kept = lists:seq(1, 2000000), io:format("READY 1~n"), io:get_line(""), io:format("~p~n", [length(Kept)]), halt()."#,
        ],
        heap: "Erlang's own heap",
        part: "other",
    },
    Program {
        name: "sbcl",
        package: "sbcl",
        arguments: &[
            "--noinform",
            "--no-sysinit",
            "--no-userinit",
            "--eval",
            r#"(let ((kept (make-list 3000000))) (format t "READY 1~%") (finish-output) (read-line) (print (length kept)))"#,
            "--quit",
        ],
        heap: "SBCL's own heap",
        part: "jit_code",
    },
    // Its collector gets the memory from malloc, in large chunks.
    Program { name: "ocaml", package: "ocaml", arguments: &[FILE], heap: "OCaml's own heap", part: "heap" },
    Program {
        name: "ghc",
        package: "ghc",
        arguments: &[
            "-e",
            "let kept = [1 .. 300000 :: Int] in putStrLn (\"READY \" ++ show (length kept)) \
             >> System.IO.hFlush System.IO.stdout >> getLine >> print (sum kept)",
        ],
        heap: "GHC's own heap",
        part: "other",
    },
    Program {
        name: "luajit",
        package: "luajit",
        arguments: &[
            "-e",
            "kept = {} for i = 1, 300000 do kept[i] = {i} end \
             print('READY 1') io.stdout:flush() io.read() print(#kept)",
        ],
        heap: "LuaJIT's own heap",
        part: "other",
    },
];

#[test]
fn heaps_of_real_runtimes_are_named_and_their_size_is_told() {
    let case = "heaps_of_real_runtimes_are_named_and_their_size_is_told";
    let Some(_turn) = turn(case) else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("kept.ml");
    std::fs::write(&file, OCAML).expect("our own directory");
    for Program { name, package, arguments, heap, part } in PROGRAMS {
        let Some(program) = tool_or_install(name, package) else {
            skipped(case, &format!("the part with {name}: it is not installed (Debian: {package})"));
            continue;
        };
        let words = arguments.iter().map(|word| word.replace(FILE, &file.display().to_string()));
        let target = Target::start_command(Command::new(program).args(words));
        let (status, found) = doctor_of(target.pid());
        assert!(status == Some(1) && found["missing"].to_string().contains(heap), "{name}: {found}");
        let said = doctor_text_of(target.pid());
        assert!(said.contains(heap) && !said.contains("Nothing would be missed"), "{said}");

        let outcome = Recorder::of(target.pid(), 4096).start().stop();
        let profile: Value = output::read(&outcome.file("profile.json"));
        let process = &profile["processes"][0];
        assert!(process["missing"].to_string().contains(heap), "{name}: {process}");
        assert!(process["resident"][part].as_u64().is_some_and(|bytes| bytes >= KEPT_BYTES), "{name}: {process}");
        let text = outcome.report(&[]);
        let missed = text.lines().find(|line| line.starts_with("  missed")).unwrap_or_default();
        assert!(!missed.is_empty() && !missed.contains("nothing") && text.contains(heap), "{text}");
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        // Of several processes, a column of the table tells it.
        let is_told = words.contains(&format!("(perhaps {heap})")) || words.contains("NOT SEEN");
        assert!(part == "heap" || is_told, "{text}");
        assert!(target.end().success(), "nothing was done to {name}");
    }
}
