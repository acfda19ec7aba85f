//! A self-contained HTML page: a flame graph of all values with search and zoom, and the report.

use std::io;

use serde::Serialize;

use super::{Format, FormatError, WriteOptions};
use crate::chains::Chains;
use crate::escape::escaped_json;
use crate::model::Profile;
use crate::report::{ReportOptions, report, subject};
use crate::value::Value;

/// The page, with a place for the data.
const PAGE: &str = include_str!("flame.html");
const PLACE: &str = "@DATA@";

/// Calls whose share of every value is smaller than this are left out: they would be invisible, and most of the page.
const LEAST_SHARE: f64 = 1.0 / 20_000.0;

pub(super) struct Html;

impl Format for Html {
    fn name(&self) -> &'static str {
        "html"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &[".html"]
    }

    fn write(&self, profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
        let shown = options.value_of(profile)?;
        let values = Value::shown_of(profile);
        let chains = Chains::new(profile, values, options.group_of(profile), false);
        let tree = Tree::new(&chains);
        let page = Page {
            subject: subject(profile),
            report: report(
                profile,
                &ReportOptions {
                    width: 130,
                    top: 30,
                    sort: Some(shown),
                    group_by: options.group_by,
                    confidence: options.confidence,
                    ..ReportOptions::default()
                },
            ),
            active: values.iter().position(|&value| value == shown).unwrap_or(0),
            values: values.iter().map(|value| PageValue { title: value.title(), unit: value.unit() }).collect(),
            names: &tree.names,
            depth: &tree.depth,
            name: &tree.name,
            value: &tree.values,
        };
        let (before, after) = PAGE.split_once(PLACE).unwrap_or((PAGE, ""));
        out.write_all(before.as_bytes())?;
        // A name with "</script>" in it must not end the data.
        let data = serde_json::to_string(&page)?.replace('<', "\\u003c");
        out.write_all(escaped_json(&data).as_bytes())?;
        out.write_all(after.as_bytes())?;
        Ok(())
    }

    fn how_to_open(&self, file: &str) -> String {
        format!("xdg-open {file}")
    }
}

#[derive(Serialize)]
struct Page<'a> {
    subject: String,
    report: String,
    active: usize,
    values: Vec<PageValue>,
    names: &'a [String],
    depth: &'a [u32],
    name: &'a [u32],
    value: &'a [Vec<i64>],
}

#[derive(Serialize)]
struct PageValue {
    title: &'static str,
    unit: &'static str,
}

/// The call tree, each node before its children. The root is the total.
#[derive(Default)]
struct Tree {
    names: Vec<String>,
    depth: Vec<u32>,
    name: Vec<u32>,
    values: Vec<Vec<i64>>,
}

impl Tree {
    fn new(chains: &Chains) -> Self {
        let mut order: Vec<usize> = (0..chains.chains.len()).collect();
        order.sort_unstable_by(|&a, &b| chains.chains[a].cmp(&chains.chains[b]));
        let mut tree = Self { values: vec![Vec::new(); chains.columns.len()], ..Self::default() };
        let root = chains.names.len() as u32;
        tree.push(0, root);
        // In sorted order, a chain shares a prefix with the previous one, whose nodes are `open`.
        let mut open: Vec<(u32, usize)> = Vec::new();
        for &index in &order {
            let chain = &chains.chains[index];
            let shared = open.iter().zip(chain.iter()).take_while(|((name, _), next)| name == *next).count();
            open.truncate(shared);
            for &name in &chain[shared..] {
                let node = tree.push(open.len() as u32 + 1, name);
                open.push((name, node));
            }
            for (values, column) in tree.values.iter_mut().zip(&chains.columns) {
                values[0] += column[index];
                open.iter().for_each(|&(_, node)| values[node] += column[index]);
            }
        }
        tree.without_small();
        tree.with_names(chains, root)
    }

    fn push(&mut self, depth: u32, name: u32) -> usize {
        self.depth.push(depth);
        self.name.push(name);
        self.values.iter_mut().for_each(|values| values.push(0));
        self.depth.len() - 1
    }

    fn without_small(&mut self) {
        let large = |values: &Vec<i64>, node: usize| values[node] as f64 >= values[0] as f64 * LEAST_SHARE;
        let is_kept =
            |node: usize| node == 0 || self.values.iter().any(|values| values[node] != 0 && large(values, node));
        let kept: Vec<usize> = (0..self.depth.len()).filter(|&node| is_kept(node)).collect();
        self.depth = kept.iter().map(|&node| self.depth[node]).collect();
        self.name = kept.iter().map(|&node| self.name[node]).collect();
        for values in &mut self.values {
            *values = kept.iter().map(|&node| values[node]).collect();
        }
    }

    /// Keeps the names in use and renumbers them.
    fn with_names(mut self, chains: &Chains, root: u32) -> Self {
        let mut new_ids = vec![None; chains.names.len() + 1];
        for name in &mut self.name {
            let id = new_ids[*name as usize].get_or_insert_with(|| {
                let text = if *name == root { "all".into() } else { chains.names[*name as usize].name.to_string() };
                self.names.push(text);
                self.names.len() as u32 - 1
            });
            *name = *id;
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::GroupBy;
    use crate::testing;

    fn html(profile: &Profile) -> String {
        let mut out = Vec::new();
        Html.write(profile, &WriteOptions::default(), &mut out).expect("memory");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn a_tree_adds_up() {
        let profile = testing::large(400, 12);
        let chains = Chains::new(&profile, &Value::COLUMNS, GroupBy::Process, false);
        let tree = Tree::new(&chains);
        for (value, values) in Value::COLUMNS.into_iter().zip(&tree.values) {
            let total: f64 = profile.rows.iter().map(|row| value.of(row)).sum();
            assert_eq!(values[0], total.round() as i64);
        }
        assert_eq!(tree.names[tree.name[0] as usize], "all");
        let children = |node: usize| -> Vec<usize> {
            let inside = (node + 1..tree.depth.len()).take_while(|&next| tree.depth[next] > tree.depth[node]);
            inside.filter(|&next| tree.depth[next] == tree.depth[node] + 1).collect()
        };
        for node in 0..tree.depth.len() {
            for values in &tree.values {
                assert!(children(node).iter().map(|&child| values[child]).sum::<i64>() <= values[node]);
            }
        }
        assert_eq!(children(0).len(), 2, "two processes");
    }

    #[test]
    fn the_page_needs_nothing_and_cannot_be_broken_out_of() {
        let mut profile = testing::small();
        profile.processes[0].comm = "</script><script>alert(1)</script>".into();
        let text = html(&profile);
        assert!(!text.contains("</script><script>alert"));
        assert!(!text.contains("http://") && !text.contains("https://") && !text.contains(PLACE));
        assert!(text.contains("parse_value") && text.contains("bytes in use"));
        let (_, rest) = text.split_once("id=\"data\">").expect("the data");
        let (data, _) = rest.split_once("</script>").expect("its end");
        let data: serde_json::Value = serde_json::from_str(data).expect("JSON");
        assert_eq!(data["active"], 3);
    }

    #[test]
    fn a_page_of_nothing_is_a_page() {
        let mut profile = testing::small();
        profile.rows.clear();
        assert!(html(&profile).contains("\"depth\":[0]"));
    }
}
