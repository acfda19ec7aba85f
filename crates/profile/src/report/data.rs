//! The tables and trees of a report as data: CSV for spreadsheets, JSON for scripts. They contain all rows, not only
//! those that fit on a screen.

use serde_json::{Map, Value as Json, json};

use super::stacks::{Group, groups, judged_groups};
use super::suspects::{Suspect, Why};
use super::tree::{Node, ROOT};
use super::{By, Context, FrameView, ReportOptions, Tree, by, subject, suspects, tree};
use crate::escape::{escaped, pretty_json};
use crate::estimates::Pool;
use crate::model::Profile;
use crate::naming::FunctionKey;
use crate::value::Value;

/// The name of the view that a report shows instead of its usual table; `None` for the usual table.
pub fn view(options: &ReportOptions) -> Option<&'static str> {
    match (&options.tree, options.by) {
        _ if options.suspects => Some("suspects"),
        (Some(Tree::Down), _) => Some("tree"),
        (Some(Tree::Callers(_)), _) => Some("callers"),
        (None, By::Stack) => None,
        (None, by) => Some(by.name()),
    }
}

/// In files, stacks have all frames. Tables of functions have the same functions as the text tables.
fn with_all_frames(options: &ReportOptions) -> ReportOptions {
    let is_of_functions = options.suspects || options.by == By::Function && options.tree.is_none();
    let all_frames = options.frames.all_frames || !is_of_functions;
    ReportOptions { frames: FrameView { all_frames, ..options.frames }, ..options.clone() }
}

/// The view as CSV: one line per row, with every value and the ends of its interval (empty if unknown).
///
/// # Errors
/// Writing to memory failed.
pub fn csv(profile: &Profile, options: &ReportOptions) -> Result<Vec<u8>, csv::Error> {
    let options = &with_all_frames(options);
    let context = Context::new(profile, options);
    let table = table(&context);
    let mut writer = csv::Writer::from_writer(Vec::new());
    let mut header: Vec<String> = table.keys.iter().map(|key| (*key).to_owned()).collect();
    header.extend(["samples", "incomplete_samples"].map(str::to_owned));
    for value in Value::shown_of(profile) {
        header.extend([value.name().to_owned(), format!("{}_low", value.name()), format!("{}_high", value.name())]);
    }
    header.extend(table.more.iter().map(|name| (*name).to_owned()));
    writer.write_record(&header)?;
    for row in &table.rows {
        let mut record: Vec<String> = row.keys.iter().map(text).collect();
        record.extend([row.pool.samples(Value::AllocSpace), row.pool.incomplete_samples()].map(|n| n.to_string()));
        for &value in Value::shown_of(profile) {
            if !row.pool.knows(profile, value) {
                record.extend([String::new(), String::new(), String::new()]);
                continue;
            }
            let estimate = row.pool.estimate(profile, value, options.confidence);
            let end = |end: Option<f64>| end.map_or_else(String::new, |end| format!("{end:.0}"));
            record.extend([format!("{:.0}", estimate.estimate), end(estimate.low), end(estimate.high)]);
        }
        record.extend(row.more.iter().map(text));
        writer.write_record(&record)?;
    }
    writer.into_inner().map_err(|error| error.into_error().into())
}

/// The view as JSON: an object with `view`, `subject`, `sorted_by`, `confidence` and `rows`, with
/// suspects also `full`. The rows have the same figures as the profile's own JSON.
///
/// # Errors
/// The view could not be encoded.
pub fn json(profile: &Profile, options: &ReportOptions) -> serde_json::Result<String> {
    let options = &with_all_frames(options);
    let context = Context::new(profile, options);
    let rows = |table: &Table| -> Vec<Json> { table.rows.iter().map(|row| row.json(&context, table)).collect() };
    let (table, full) = if options.suspects {
        let [suspects, full] = of_suspects(&context);
        (suspects, Some(rows(&full)))
    } else {
        (table(&context), None)
    };
    let mut whole = json!({
        "view": view(options).unwrap_or("stack"),
        "subject": subject(profile),
        "sorted_by": context.sort.name(),
        "confidence": options.confidence,
        "rows": rows(&table),
    });
    full.into_iter().for_each(|full| whole["full"] = full.into());
    pretty_json(&whole)
}

/// A table before it is written.
struct Table {
    /// Names of the columns that identify rows.
    keys: Vec<&'static str>,
    /// Names of the columns after the figures.
    more: Vec<&'static str>,
    rows: Vec<Row>,
}

/// A row, with the cells around its figures.
struct Row {
    keys: Vec<Json>,
    pool: Pool,
    more: Vec<Json>,
}

/// A cell of CSV.
fn text(cell: &Json) -> String {
    match cell {
        Json::String(text) => escaped(text).into_owned(),
        // Calls from the outermost to the innermost, as in folded stacks.
        Json::Array(calls) => {
            let calls = calls.iter().rev().map(|call| escaped(call.as_str().unwrap_or_default()).replace(';', ":"));
            calls.collect::<Vec<_>>().join(";")
        }
        Json::Number(number) if number.is_f64() => number.as_f64().unwrap_or_default().to_string(),
        Json::Null => String::new(),
        other => other.to_string(),
    }
}

impl Row {
    fn json(&self, context: &Context, table: &Table) -> Json {
        let mut object = Map::new();
        let named = |names: &[&'static str], cells: &[Json]| -> Vec<(String, Json)> {
            names.iter().zip(cells).map(|(name, cell)| ((*name).to_owned(), cell.clone())).collect()
        };
        object.extend(named(&table.keys, &self.keys));
        object.insert("samples".into(), json!(self.pool.samples(Value::AllocSpace)));
        object.insert("incomplete_samples".into(), json!(self.pool.incomplete_samples()));
        for &value in Value::shown_of(context.profile) {
            let known = self.pool.knows(context.profile, value);
            let estimate = known.then(|| self.pool.estimate(context.profile, value, context.options.confidence));
            object.insert(value.json_name().into(), json!(estimate));
        }
        object.extend(named(&table.more, &self.more));
        Json::Object(object)
    }
}

fn table(context: &Context) -> Table {
    match (&context.options.tree, context.options.by) {
        _ if context.options.suspects => {
            let [suspects, _] = of_suspects(context);
            suspects
        }
        (Some(tree), _) => of_tree(context, tree),
        (None, By::Stack) => of_stacks(context),
        (None, by) => of_entries(context, by),
    }
}

fn of_entries(context: &Context, by: By) -> Table {
    let more = match by {
        By::Function => ["self"].into_iter().chain(OF_FUNCTIONS).collect(),
        _ if by.is_of_frames() => vec!["self"],
        _ => Vec::new(),
    };
    let row = |entry: by::Entry| {
        let (function, short) = entry.function;
        // The names of functions do not depend on what other rows there are.
        let (name, of_function) = match by {
            By::Function => (short, of_function(&function)),
            _ => (entry.name, Default::default()),
        };
        let more = [json!(entry.itself.round())].into_iter().chain(of_function).take(more.len());
        Row { keys: vec![json!(name)], pool: entry.pool, more: more.collect() }
    };
    let rows = by::entries(context, by).into_iter().map(row).collect();
    Table { keys: vec![by.name()], more, rows }
}

/// Columns that tell functions apart.
const OF_FUNCTIONS: [&str; 2] = ["full_name", "module"];

fn of_function(function: &FunctionKey) -> [Json; 2] {
    [json!(function.name), json!(function.home)]
}

/// The keys of a stack, and the places of its calls. Full names and places tell stacks apart.
fn of_stack(context: &Context, group: &Group) -> ([Json; 3], Json) {
    let view = FrameView { all_frames: true, full_names: true, ..context.options.frames };
    let calls = group.chain_in(context, view, &view.shown(&group.row.key.stack, &[]));
    let (calls, places): (Vec<_>, Vec<_>) = calls.into_iter().map(|(call, _)| (call.name, call.place)).unzip();
    ([json!(group.name), json!(calls), json!(group.cut)], json!(places))
}

const STACK_KEYS: [&str; 3] = ["group", "stack", "incomplete"];
/// The column of places, after the figures.
const PLACES: &str = "places";

fn of_stacks(context: &Context) -> Table {
    let row = |group: &Group| {
        let (keys, places) = of_stack(context, group);
        Row { keys: keys.into(), pool: group.pool.clone(), more: vec![places] }
    };
    Table { keys: STACK_KEYS.into(), more: vec![PLACES], rows: groups(context).iter().map(row).collect() }
}

/// Nodes from top to bottom, each after its parent; `parent` is a row number, counted from 0.
fn of_tree(context: &Context, tree: &Tree) -> Table {
    let (nodes, functions) = tree::build(context, tree);
    let mut rows: Vec<Row> = Vec::new();
    let mut open: Vec<(usize, u64, Option<usize>)> =
        nodes[ROOT].children.iter().rev().map(|&child| (child, 0, None)).collect();
    while let Some((node, depth, parent)) = open.pop() {
        let number = rows.len();
        let Node { label, pool, children, .. } = &nodes[node];
        let (function, short) = functions.0.get_index(*label).unzip();
        let keys = vec![json!(number), json!(parent), json!(depth), json!(short)];
        rows.push(Row { keys, pool: pool.clone(), more: function.map(of_function).into_iter().flatten().collect() });
        open.extend(children.iter().rev().map(|&child| (child, depth + 1, Some(number))));
    }
    Table { keys: vec!["row", "parent", "depth", "function"], more: OF_FUNCTIONS.into(), rows }
}

/// Columns of suspects after the figures.
const OF_SUSPECTS: &str = "growth_per_second growth_low growth_high q_value usual_seconds freed beyond_seconds older \
    freed_beyond expected_beyond";

/// The suspects; and stacks that were filled and have not changed since, so that they are not taken for leaks.
fn of_suspects(context: &Context) -> [Table; 2] {
    let groups = judged_groups(context);
    let found = suspects::find(context, &groups);
    let suspect = |suspect: &Suspect| {
        let first = suspect.stacks.first()?;
        let mut pool = Pool::default();
        suspect.stacks.iter().flat_map(|group| &group.rows).for_each(|row| pool.add(row));
        pool.allow_for(&context.intervals);
        let per_second = suspect.grown.map(|grown| grown.per_second);
        let mut more = vec![
            json!(per_second.map(|it| it.estimate)),
            json!(per_second.and_then(|it| it.low)),
            json!(per_second.and_then(|it| it.high)),
        ];
        more.extend(match &suspect.why {
            Why::Outlives { found, q_value } => [
                json!(q_value),
                json!(found.usual_seconds),
                json!(found.freed),
                json!(found.beyond_seconds),
                json!(found.older),
                json!(found.freed_beyond),
                json!(found.expected_beyond),
            ],
            _ => std::array::from_fn(|_| Json::Null),
        });
        let (stack, places) = of_stack(context, first);
        more.extend(of_function(&suspect.function));
        more.push(places);
        let keys = [json!(suspect.why.name()), json!(suspect.short)].into_iter().chain(stack);
        Some(Row { keys: keys.collect(), pool, more })
    };
    let full = |(group, seconds): &(&Group, f64)| {
        let (keys, places) = of_stack(context, group);
        Row { keys: keys.into(), pool: group.pool.clone(), more: vec![json!(seconds), places] }
    };
    let more = vec!["full_seconds", PLACES];
    let full = Table { keys: STACK_KEYS.into(), more, rows: found.full.iter().map(full).collect() };
    let suspects = Table {
        keys: ["why", "function"].into_iter().chain(STACK_KEYS).collect(),
        more: OF_SUSPECTS.split(' ').chain(OF_FUNCTIONS).chain([PLACES]).collect(),
        rows: found.suspects.iter().filter_map(suspect).collect(),
    };
    [suspects, full]
}

#[cfg(test)]
mod tests {
    use regex::Regex;

    use super::*;
    use crate::origin::FrameRules;
    use crate::report::golden;
    use crate::testing;

    fn views() -> Vec<ReportOptions> {
        let default = ReportOptions::default;
        let mut views: Vec<ReportOptions> = By::ALL.into_iter().map(|by| ReportOptions { by, ..default() }).collect();
        views.push(ReportOptions { tree: Some(Tree::Down), ..default() });
        let callers = Regex::new("^parse").expect("an expression");
        views.push(ReportOptions { tree: Some(Tree::Callers(callers)), ..default() });
        views.push(ReportOptions { suspects: true, ..default() });
        views
    }

    /// CSV and JSON of each view have the same rows and figures.
    #[test]
    fn every_view_is_csv_and_json() {
        let profile = golden::leaking();
        for options in views() {
            let name = view(&options);
            let text = csv(&profile, &options).expect("memory");
            let mut reader = csv::Reader::from_reader(text.as_slice());
            let header = reader.headers().expect("a header").clone();
            let at = header.iter().position(|column| column == "alloc_space").expect("a column");
            let records: Vec<csv::StringRecord> = reader.records().collect::<Result<_, _>>().expect("records");
            let json: Json = serde_json::from_str(&json(&profile, &options).expect("JSON")).expect("JSON");
            let rows = json["rows"].as_array().expect("rows");
            assert_eq!((rows.len(), json["view"].as_str()), (records.len(), Some(name.unwrap_or("stack"))));
            assert!(!rows.is_empty(), "{name:?}");
            for (row, record) in rows.iter().zip(&records) {
                let estimate = row["alloc_bytes"]["estimate"].as_f64().expect("an estimate");
                assert_eq!(format!("{estimate:.0}"), record[at], "{name:?}: {row}");
            }
        }
    }

    /// Scripts depend on these names (docs/scripting.md): keys may be added, none is renamed or removed.
    #[test]
    fn keys_of_json_stay() {
        let figures = "samples incomplete_samples inuse_bytes inuse_objects alloc_bytes alloc_objects";
        let of_suspects =
            format!("why function group stack incomplete {figures} {OF_SUSPECTS_TOLD} full_name module places");
        let of_functions = format!("function self {figures} full_name module");
        let by_function = ReportOptions { by: By::Function, ..ReportOptions::default() };
        let suspects = ReportOptions { suspects: true, ..ReportOptions::default() };
        for (options, name, expected) in [(suspects, "suspects", of_suspects), (by_function, "function", of_functions)]
        {
            let json: Json = serde_json::from_str(&json(&golden::leaking(), &options).expect("JSON")).expect("JSON");
            assert_eq!(json["view"], name);
            let row = &json["rows"][0];
            testing::has_keys(&json, "view subject sorted_by confidence rows");
            testing::has_keys(row, &expected);
            testing::has_keys(&row["inuse_bytes"], "estimate low high exact");
        }
    }

    /// What [`OF_SUSPECTS`] must have.
    const OF_SUSPECTS_TOLD: &str = "growth_per_second growth_low growth_high q_value usual_seconds freed \
        beyond_seconds older freed_beyond expected_beyond";

    /// A suspect is named as in the text, and has its whole stack.
    #[test]
    fn suspects_are_functions_of_the_program() {
        let rules = FrameRules::with("library function grow").expect("a rule");
        let rules: &'static FrameRules = Box::leak(Box::new(rules));
        let frames = FrameView { rules, ..FrameView::default() };
        let options = ReportOptions { suspects: true, frames, ..ReportOptions::default() };
        let json: Json = serde_json::from_str(&json(&golden::leaking(), &options).expect("JSON")).expect("JSON");
        let rows = json["rows"].as_array().expect("rows");
        assert_eq!(rows.iter().map(|row| &row["why"]).collect::<Vec<_>>(), ["only grows", "outlives"]);
        for row in rows {
            assert_eq!((&row["function"], &row["stack"][0]), (&json!("parse_value"), &json!("grow")));
        }
    }

    /// The name of a function does not depend on what other rows there are, and what they are is told apart.
    #[test]
    fn rows_of_overloads_and_lines_are_told_apart() {
        let profile = golden::leaking().only_process(0);
        let alone = testing::with_overload(profile.clone(), "grow", ["grow(int)"; 2]);
        let overloads = testing::with_overload(profile, "grow", ["grow(int)", "grow(long)"]);
        let rows = |profile: &Profile, options: ReportOptions| {
            let json: Json = serde_json::from_str(&json(profile, &options).expect("JSON")).expect("JSON");
            json["rows"].as_array().expect("rows").clone()
        };
        let functions = |profile: &Profile, options: &ReportOptions| -> Vec<(String, String)> {
            let text = |row: &Json, key: &str| row[key].as_str().expect("text").to_owned();
            let all = rows(profile, options.clone());
            let all = all.iter().map(|row| (text(row, "function"), text(row, "full_name")));
            let mut all: Vec<_> = all.filter(|(_, full_name)| full_name.starts_with("grow(")).collect();
            all.sort();
            all.dedup();
            all
        };
        let row = |full_name: &str| ("grow".to_owned(), full_name.to_owned());
        let by_function = ReportOptions { by: By::Function, ..ReportOptions::default() };
        let tree = ReportOptions { tree: Some(Tree::Down), ..ReportOptions::default() };
        for options in [by_function, tree, ReportOptions { suspects: true, ..ReportOptions::default() }] {
            assert_eq!(functions(&alone, &options), [row("grow(int)")]);
            assert_eq!(functions(&overloads, &options), [row("grow(int)"), row("grow(long)")]);
        }
        let of_stack = |row: Json| ["group", "stack", "places", "incomplete"].map(|key| row[key].to_string());
        let mut stacks: Vec<_> = rows(&overloads, ReportOptions::default()).into_iter().map(of_stack).collect();
        let number = stacks.len();
        stacks.sort();
        stacks.dedup();
        assert_eq!((stacks.len(), number), (number, 4), "{stacks:#?}");
    }

    #[test]
    fn rows_have_the_names_of_what_they_are_by() {
        let names = |by| {
            let text = csv(&testing::small(), &ReportOptions { by, ..ReportOptions::default() }).expect("memory");
            let lines: Vec<String> =
                String::from_utf8(text).expect("text").lines().skip(1).map(str::to_owned).collect();
            move |all: &[&str]| {
                let is_there = lines.iter().zip(all).all(|(line, name)| line.contains(name));
                assert!(lines.len() == all.len() && is_there, "{by:?}: {lines:?}");
            }
        };
        names(By::Module)(&["/usr/bin/server", "/srv/lib/libjson.so"]);
        names(By::File)(&["/src/server.cc", "/src/main.c", "/src/json.c", "[no file known: /srv/lib/libjson.so]"]);
        names(By::Program)(&["server (4242)", "(4300)"]);
        names(By::Thread)(&["server (4242) / worker", "(4300) / worker"]);
    }

    #[test]
    fn rows_have_the_number_of_their_samples_that_lack_callers() {
        let options = ReportOptions { by: By::Program, ..ReportOptions::default() };
        let json: Json = serde_json::from_str(&json(&testing::small(), &options).expect("JSON")).expect("JSON");
        let counts = |row: &Json| ["samples", "incomplete_samples"].map(|key| row[key].as_u64());
        let counts: Vec<[Option<u64>; 2]> = json["rows"].as_array().expect("rows").iter().map(counts).collect();
        assert_eq!(counts, [[Some(49), Some(0)], [Some(11), Some(2)]]);
    }

    #[test]
    fn a_tree_has_parents_before_their_children() {
        let options = ReportOptions { tree: Some(Tree::Down), ..ReportOptions::default() };
        let json: Json = serde_json::from_str(&json(&testing::small(), &options).expect("JSON")).expect("JSON");
        let rows = json["rows"].as_array().expect("rows");
        for (number, row) in rows.iter().enumerate() {
            assert_eq!(row["row"], number);
            let depth = row["depth"].as_u64().expect("a depth");
            match row["parent"].as_u64() {
                Some(parent) => assert!(parent < number as u64 && rows[parent as usize]["depth"] == depth - 1),
                None => assert_eq!(depth, 0),
            }
        }
    }

    #[test]
    fn names_are_written_as_they_are_and_stay_in_their_cells() {
        let mut profile = testing::small();
        profile.processes[0].comm = "a,\"b\"\n\x1b[2J".into();
        let text = csv(&profile, &ReportOptions { by: By::Program, ..ReportOptions::default() }).expect("memory");
        let text = String::from_utf8(text).expect("text");
        assert!(text.contains("\"a,\"\"b\"\"\\n\\u{1b}[2J") && !text.contains('\x1b'), "{text}");
    }
}
