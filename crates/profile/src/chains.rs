//! Stacks as chains of names with integer values, for flame graphs.

use std::borrow::Cow;

use indexmap::IndexSet;

use super::group::{GroupBy, Groups};
use super::intern::Interned;
use super::model::Profile;
use super::naming::frame_name;
use super::round::largest_remainder;
use super::value::Value;

/// Distinct chains of names with their values.
#[derive(Debug)]
pub struct Chains<'a> {
    /// Distinct names.
    pub names: Vec<Name<'a>>,
    /// Chains as indices into `names`, outermost first, each with a non-zero value.
    pub chains: Vec<Box<[u32]>>,
    /// For each requested value, the rounded values of all chains, which add up to the rounded total.
    pub columns: Vec<Vec<i64>>,
}

/// The name of a function or group, or a placeholder for a missing name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Name<'a> {
    /// The name.
    pub name: Cow<'a, str>,
    /// The source file, if files were requested.
    pub file: Option<&'a str>,
}

impl<'a> Chains<'a> {
    /// Builds the chains of a profile for the given values. `group_by` determines the outermost name; with
    /// `with_files`, functions of the same name in different files are kept apart.
    pub fn new(profile: &'a Profile, values: &[Value], group_by: GroupBy, with_files: bool) -> Self {
        let interned = Interned::for_viewers(profile);
        let groups = Groups::new(profile, group_by);
        let mut names = IndexSet::new();
        let mut id = |name: Cow<'a, str>, file: Option<&'a str>| names.insert_full(Name { name, file }).0 as u32;
        let name_of_frame: Vec<u32> = interned
            .frames
            .iter()
            .map(|frame| id(frame_name(profile, frame), frame.file.as_deref().filter(|_| with_files)))
            .collect();
        let mut sums: Vec<Vec<f64>> = vec![Vec::new(); values.len()];
        let mut chains: IndexSet<Box<[u32]>> = IndexSet::new();
        let mut chain = Vec::new();
        for (row, &stack) in profile.rows.iter().zip(&interned.stack_of_row) {
            chain.clear();
            let group = groups.name(row);
            if !group.is_empty() {
                chain.push(id(group, None));
            }
            if interned.stacks[stack as usize].stack.cut.is_some() {
                chain.push(id("[incomplete]".into(), None));
            }
            chain.extend(interned.frame_ids(stack).iter().rev().map(|&frame| name_of_frame[frame as usize]));
            let index = chains.get_index_of(chain.as_slice()).unwrap_or_else(|| {
                sums.iter_mut().for_each(|column| column.push(0.0));
                chains.insert_full(chain.as_slice().into()).0
            });
            sums.iter_mut().zip(values).for_each(|(column, value)| column[index] += value.of(row));
        }
        let columns = sums.iter().map(|column| largest_remainder(column)).collect();
        let mut chains = Self { names: names.into_iter().collect(), chains: chains.into_iter().collect(), columns };
        chains.drop_zeros();
        chains
    }

    fn drop_zeros(&mut self) {
        let kept: Vec<bool> =
            (0..self.chains.len()).map(|index| self.columns.iter().any(|column| column[index] != 0)).collect();
        let mut keep = kept.iter();
        self.chains.retain(|_| keep.next() == Some(&true));
        for column in &mut self.columns {
            let mut keep = kept.iter();
            column.retain(|_| keep.next() == Some(&true));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn text(chains: &Chains) -> Vec<String> {
        let name = |&id: &u32| &*chains.names[id as usize].name;
        chains.chains.iter().map(|chain| chain.iter().map(name).collect::<Vec<_>>().join(";")).collect()
    }

    #[test]
    fn chains_begin_with_the_group_and_end_with_the_innermost_call() {
        let profile = testing::small();
        let chains = Chains::new(&profile, &[Value::InuseSpace], GroupBy::Process, false);
        let expected = "server (4242);main;handle(Request const&);parse_value;parse_value;parse_value;grow";
        assert_eq!(text(&chains)[0], expected);
        assert!(text(&chains).iter().any(|chain| chain.contains("[incomplete];handle")));
    }

    #[test]
    fn values_add_up_for_every_value_and_grouping() {
        let profile = testing::small();
        for group_by in GroupBy::ALL {
            let chains = Chains::new(&profile, &Value::COLUMNS, group_by, true);
            for (value, column) in Value::COLUMNS.into_iter().zip(&chains.columns) {
                let total: f64 = profile.rows.iter().map(|row| value.of(row)).sum();
                assert_eq!(column.iter().sum::<i64>(), total.round() as i64);
                assert_eq!(column.len(), chains.chains.len());
            }
        }
    }

    #[test]
    fn chains_without_a_value_are_left_out() {
        let mut profile = testing::small();
        profile.rows[3].inuse = Default::default();
        let of = |values: &[Value]| Chains::new(&profile, values, GroupBy::Nothing, false).chains.len();
        assert_eq!((of(&[Value::InuseSpace]), of(&Value::COLUMNS)), (2, 3));
    }
}
