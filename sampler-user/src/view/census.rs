//! What is in use in a process, by type and size, as a text table and as data.

use heapbpf_glibc::{Language, Pools, What};
use heapbpf_host::census::Taken;
use heapbpf_host::process::ProcessInfo;
use heapbpf_profile::escape::escaped;
use heapbpf_profile::report::text::{Column, Style, Table, wrap};
use heapbpf_profile::units;
use heapbpf_symbols::demangle::Demangler;
use serde::Serialize;

use super::TableOptions;

/// Prefix that turns a type's mangled name into a symbol, and prefix of the demangled name of such a symbol.
const SYMBOL: &str = "_ZTS";
const SYMBOL_MEANS: &str = "typeinfo name for ";

/// Censuses; `heapbpf census --format json` serializes them.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Counts {
    /// One per process.
    pub processes: Vec<Counted>,
}

/// The census of a process. All `bytes` fields are in bytes. Those of blocks include headers and rounding.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Counted {
    /// Process id.
    pub pid: u32,
    /// Name.
    pub comm: String,
    /// Executable.
    pub exe: String,
    /// Version of its glibc.
    pub glibc: String,
    /// How long counting took.
    pub seconds: f64,
    /// Whether time ran out before everything was read.
    pub late: bool,
    /// Whether the sums are exact.
    pub exact: bool,
    /// Whether there were too many types to distinguish them all.
    pub more_types: bool,
    /// Bytes in use, including Python's small objects.
    pub inuse_bytes: u64,
    /// Blocks in use.
    pub inuse_blocks: u64,
    /// Bytes that glibc has free.
    pub free_bytes: u64,
    /// The part of these that is in thread caches and fast bins.
    pub cached_bytes: u64,
    /// The part of what is in use that is on pages not in memory.
    pub absent_bytes: u64,
    /// Upper bound of what is in use that may actually be in a cache: before glibc 2.34.
    pub doubtful_bytes: u64,
    /// What was not read because it is not in memory, or because time ran out.
    pub unread_bytes: u64,
    /// What was not read because it is inconsistent.
    pub inconsistent_bytes: u64,
    /// The part of what is in use that is blocks of Python's small-object allocator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub python_small_bytes: Option<u64>,
    /// Resident anonymous memory outside these heaps: stacks, variables, other allocators. Unknown if time ran out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub elsewhere_bytes: Option<u64>,
    /// What is in use, largest first.
    pub rows: Vec<Alike>,
}

/// Blocks of one type or size.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Alike {
    /// `c++`, `python`, `size`, `python size`.
    pub kind: &'static str,
    /// The type. Absent for a size.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Smallest and largest request that yields such a block. Absent for a type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sizes: Option<[u64; 2]>,
    /// Sum of their sizes.
    pub bytes: u64,
    /// Their number.
    pub blocks: u64,
}

impl Alike {
    fn new(row: heapbpf_glibc::Row, demangler: &Demangler) -> Self {
        let (kind, name, sizes) = match row.what {
            What::Type(Language::Cpp, name) => ("c++", Some(demangled(&name, demangler)), None),
            What::Type(Language::Python, name) => ("python", Some(name), None),
            What::Sizes(sizes) => ("size", None, Some([sizes.from, sizes.to])),
            What::PythonSize(size) => ("python size", None, Some([size.saturating_sub(15), size])),
        };
        Self { kind, name, sizes, bytes: row.bytes, blocks: row.blocks }
    }

    fn label(&self) -> String {
        let of_python = if self.kind.starts_with("python") { " (Python)" } else { "" };
        match (&self.name, self.sizes) {
            (Some(name), _) => format!("{}{of_python}", escaped(name)),
            (None, Some([from, to])) => {
                format!("size class {} to {} B{of_python}", units::count(from as f64), units::count(to as f64))
            }
            (None, None) => "unknown".into(),
        }
    }
}

/// Returns the name of a C++ type, or its mangled name if it cannot be demangled.
fn demangled(name: &str, demangler: &Demangler) -> String {
    let full = demangler.demangle(&format!("{SYMBOL}{name}")).ok().flatten();
    let full = full.as_deref().and_then(|full| full.strip_prefix(SYMBOL_MEANS));
    full.unwrap_or(name).to_owned()
}

impl Counted {
    /// Collects what was counted in a process.
    #[must_use]
    pub fn new(process: &ProcessInfo, taken: Taken, demangler: &Demangler) -> Self {
        let Taken { census, version, anonymous_bytes, took, is_late } = taken;
        let (heap, python) = (census.heap, census.python);
        let of_pools = python.inuse_bytes.saturating_add(python.free_bytes).saturating_add(python.inconsistent_bytes);
        let resident = heap.resident_bytes.saturating_add(of_pools);
        Self {
            pid: process.pid,
            comm: process.comm.to_string(),
            exe: process.exe.to_string(),
            glibc: format!("2.{version}"),
            seconds: took.as_secs_f64(),
            late: is_late,
            exact: heap.is_exact() && python.inconsistent_bytes == 0 && !is_late,
            more_types: census.has_more_types,
            inuse_bytes: heap.inuse_bytes.saturating_add(python.inuse_bytes),
            inuse_blocks: heap.inuse_blocks.saturating_add(python.inuse_blocks),
            free_bytes: heap.free_bytes,
            cached_bytes: heap.cached_bytes,
            absent_bytes: heap.absent_bytes,
            doubtful_bytes: heap.doubtful_bytes,
            unread_bytes: heap.absent_unread_bytes,
            inconsistent_bytes: heap.inconsistent_bytes.saturating_add(python.inconsistent_bytes),
            python_small_bytes: (python != Pools::default()).then_some(python.inuse_bytes),
            elsewhere_bytes: (!is_late).then(|| anonymous_bytes.saturating_sub(resident)),
            rows: census.rows.into_iter().map(|row| Alike::new(row, demangler)).collect(),
        }
    }

    /// Returns a part's share of the heap.
    fn share(&self, bytes: u64) -> String {
        let all = self.inuse_bytes + self.free_bytes + self.unread_bytes + self.inconsistent_bytes;
        units::percent(if all > 0 { bytes as f64 / all as f64 } else { 0.0 })
    }

    /// Returns what limits the figures, one sentence each.
    fn remarks(&self) -> Vec<String> {
        let bytes = |bytes: u64| units::bytes(bytes as f64);
        let mut said = vec![format!(
            "not consistent: {}; not read: {}; {} of what is in use is not in memory",
            self.share(self.inconsistent_bytes),
            self.share(self.unread_bytes),
            bytes(self.absent_bytes)
        )];
        if let Some(elsewhere) = self.elsewhere_bytes.filter(|elsewhere| *elsewhere > self.inuse_bytes / 10) {
            said.push(format!(
                "{} of resident memory is in none of these heaps, and not counted: stacks, variables, other allocators",
                bytes(elsewhere)
            ));
        }
        if self.late {
            said.push("not everything was read in time: raise --limit".into());
        }
        if self.doubtful_bytes > 0 {
            said.push(format!(
                "up to {} of what is in use may be free blocks in thread caches, which cannot be told apart before glibc \
                 2.34",
                bytes(self.doubtful_bytes)
            ));
        }
        if self.more_types {
            said.push("too many types to list them all: objects of the others are counted by size".into());
        }
        said
    }
}

/// The census as text.
pub fn table(counted: &Counted, options: TableOptions) -> String {
    let bytes = |bytes: u64| units::bytes(bytes as f64);
    let count = |count: u64| units::count(count as f64);
    let title = format!("{} ({}), glibc {}", escaped(&counted.comm), counted.pid, counted.glibc);
    let mut lines = vec![Style::Bold.paint(&title, options.color)];
    let of_python =
        counted.python_small_bytes.map(|small| format!(", {} of them Python's small objects", bytes(small)));
    let sums = format!(
        "in use: {} in {} blocks{}; free: {}, {} of it in caches; counted in {}, without stopping it",
        bytes(counted.inuse_bytes),
        count(counted.inuse_blocks),
        of_python.unwrap_or_default(),
        bytes(counted.free_bytes),
        bytes(counted.cached_bytes),
        units::seconds(counted.seconds)
    );
    std::iter::once(sums).chain(counted.remarks()).for_each(|text| lines.extend(wrap(&text, options.width)));
    lines.push(String::new());
    let mut table = Table::new(vec![
        Column::right("BYTES", Style::Bold),
        Column::right("SHARE", Style::Plain).dispensable(1),
        Column::right("BLOCKS", Style::Plain),
        Column::left("TYPE OR SIZE", Style::Plain),
    ]);
    let mut row = |sum: u64, blocks: u64, what: String| {
        let share = units::share(sum as f64 / counted.inuse_bytes.max(1) as f64);
        table.row(vec![bytes(sum), share, count(blocks), what]);
    };
    let top = options.top.min(counted.rows.len());
    counted.rows[..top].iter().for_each(|it| row(it.bytes, it.blocks, it.label()));
    let shown = |of: fn(&Alike) -> u64| counted.rows[..top].iter().map(of).sum::<u64>();
    let rest = counted.inuse_bytes.saturating_sub(shown(|it| it.bytes));
    if rest > 0 {
        row(rest, counted.inuse_blocks.saturating_sub(shown(|it| it.blocks)), "others".into());
    }
    let (head, rows) = table.lines(options.width, options.color);
    lines.push(head);
    lines.extend(rows);
    lines.push(String::new());
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use heapbpf_glibc::{Census, Heap, Row};

    use super::*;

    fn counted(is_late: bool) -> Counted {
        let row = |what, blocks, bytes| Row { what, blocks, bytes };
        let cpp = |name: &str| What::Type(Language::Cpp, name.into());
        let rows = vec![
            row(cpp("N4shop7SessionE"), 212_000, 41 << 20),
            row(What::Type(Language::Python, "dict".into()), 100, 6400),
            row(What::Sizes((25..=40).into()), 50, 2400),
            row(What::PythonSize(64), 10, 640),
            row(cpp("not.mangled"), 1, 32),
        ];
        let heap = Heap {
            resident_bytes: 42 << 20,
            inuse_blocks: 212_151,
            inuse_bytes: (41 << 20) + 8832,
            free_bytes: 1 << 20,
            absent_unread_bytes: 2 << 20,
            ..Heap::default()
        };
        let python = Pools { pools: 1, inuse_blocks: 10, inuse_bytes: 640, ..Pools::default() };
        let census = Census { heap, python, rows, has_more_types: true };
        let taken = Taken { census, version: 36, anonymous_bytes: 100 << 20, took: Duration::from_millis(40), is_late };
        let process = ProcessInfo { pid: 7, comm: "shop".into(), ..ProcessInfo::default() };
        Counted::new(&process, taken, &Demangler::default())
    }

    #[test]
    fn the_table_has_sums_limits_and_the_largest_rows() {
        let shown = table(&counted(true), TableOptions { width: 100, top: 4, ..TableOptions::default() });
        for expected in [
            "shop (7), glibc 2.36",
            "in use: 41.0 MiB in 212,161 blocks, 640 B of them Python's small objects",
            "not read: 4.5 %",
            "--limit",
            "212,000  shop::Session",
            "dict (Python)",
            "size class 25 to 40 B",
            "size class 49 to 64 B (Python)",
            "1  others",
        ] {
            assert!(shown.contains(expected), "{expected:?} is missing in\n{shown}");
        }
        let in_time = table(&counted(false), TableOptions { width: 100, top: 4, ..TableOptions::default() });
        assert!(in_time.contains("58.0 MiB of resident memory is in none of these heaps"), "{in_time}");
        assert!(!shown.contains("none of these") && !in_time.contains("--limit"), "{shown}");
        assert!(!shown.contains("not.mangled") && shown.lines().count() <= 25, "{shown}");
        let all = table(&counted(true), TableOptions { width: 100, top: 20, ..TableOptions::default() });
        assert!(all.contains("not.mangled") && !all.contains("others\n"), "{all}");
    }

    #[test]
    fn a_row_in_json_says_its_kind() {
        let json = serde_json::to_value(counted(true)).expect("plain data");
        let rows = json["rows"].as_array().expect("rows");
        let kinds: Vec<_> = rows.iter().map(|row| row["kind"].as_str().unwrap_or_default()).collect();
        assert_eq!(kinds, ["c++", "python", "size", "python size", "c++"]);
        assert_eq!((&rows[0]["type"], &rows[2]["sizes"]), (&"shop::Session".into(), &serde_json::json!([25, 40])));
        assert_eq!((json["exact"].as_bool(), json["late"].as_bool()), (Some(false), Some(true)));
    }
}
