"""What `mutants.py` runs against which tests, edits that a test must notice, and edits that no test can notice."""

from __future__ import annotations

from typing import NamedTuple


def _top(*names: str) -> list[str]:
    return [f"tests/test_{name}.py" for name in names]


def _capture(*names: str) -> list[str]:
    return [f"tests/capture/test_{name}.py" for name in (*names, "event_order")]


# The tests of each module, those that notice most first.
TESTS = {
    "instrument/record/config/schedule.py": [
        "tests/test_schedule.py",
        "tests/test_config.py::test_bad_options_get_one_sentence",
        "tests/test_session.py::test_step_number_set_past_the_last_window",
    ],
    "instrument/record/config/schema.py": [
        *_top("config", "schedule", "hydra"),
        "tests/test_exporter.py::test_instances_and_mappings_both_reach_the_exporter",
        "tests/test_ranks.py::test_what_names_no_ranks_is_refused",
        "tests/test_redact.py",
        "tests/test_modules.py",
        "tests/test_memory_categories.py::test_exact_bytes_of_categories",
        "tests/test_upload.py::test_refused_upload_options",
    ],
    "instrument/record/step_loop.py": [
        *_top("schedule", "calls", "phases", "window_limit", "captures", "session"),
        "tests/test_faults.py::test_sigterm_is_held_back_until_the_step_ends",
        "tests/test_faults.py::test_a_forked_child_leaves_the_window_to_its_parent",
        "tests/test_threads.py::test_step_on_another_thread",
        "tests/test_threads.py::test_steps_while_a_window_ends",
        "tests/triggers/test_file.py::test_the_command_has_a_running_session_record",
        "tests/triggers/test_memory_growth.py::test_its_windows_record_memory",
    ],
    "instrument/record/session.py": [
        *_top("calls", "phases", "loaders", "session"),
        "tests/triggers/test_out_of_memory.py::test_snapshot_folder",
        "tests/test_metadata.py::test_what_cannot_be_written_is_warned_of_and_ends_nothing",
        "tests/test_faults.py::test_exit_without_stop",
        "tests/test_notebook_log.py::test_the_log_of_a_session_in_a_notebook_is_on_stdout",
    ],
    "instrument/record/long_steps.py": [
        "tests/test_run_command.py::test_long_steps_outside_windows_are_found",
        "tests/test_run_command.py::test_steps_that_get_slower_are_found",
        "tests/test_run_command.py::test_slower_steps_hide_no_long_ones",
        "tests/test_run_command.py::test_steps_that_vary_do_not_get_slower",
        "tests/test_run_command.py::test_a_few_steps_that_get_slower_are_enough",
    ],
    "instrument/record/metrics.py": _top("metrics"),
    "instrument/record/requests.py": [*_top("requests"), "tests/integrations/test_asgi.py"],
    "instrument/record/unedited.py": [
        "tests/test_run_command.py::test_cycle_ends_step",
        *_top("run_command"),
    ],
    "instrument/base/queue.py": [
        *_top("leftovers", "captures"),
        "tests/test_exporter.py::test_a_name_that_is_taken_or_on_its_way_is_not_taken_again",
        "tests/test_exporter.py::test_a_window_without_its_capture_json_is_not_queued",
        "tests/test_exporter.py::test_queued_windows_are_looked_for_as_deep_as_asked",
        "tests/test_exporter.py::test_publish_name_taken",
        "tests/test_exporter.py::test_half_a_character_does_not_make_capture_json_unreadable",
        "tests/test_exporter.py::test_a_folder_that_somebody_removed_is_made_again",
        "tests/test_exporter.py::test_unnamed_folder_is_removed",
        "tests/test_hydra.py::test_an_application_that_knows_nothing_of_us",
        "tests/test_session.py::test_a_folder_that_cannot_be_written_is_told_before_the_first_step",
    ],
    "instrument/record/finisher.py": [
        *_top("captures", "upload", "faults"),
        "tests/test_exporter.py::test_an_exporter_that_cannot_begin_is_said_once_and_loses_nothing",
        "tests/sinks/test_trackers.py::test_no_capture_is_removed_before_a_tracker_has_it",
    ],
    "instrument/export/window.py": [
        *_top("captures", "upload"),
        "tests/test_ranks_command.py::test_a_summary_that_cannot_be_made_costs_nothing_else",
        "tests/test_exporter.py::"
        "test_one_per_role_keeps_traces",
        "tests/test_exporter.py::"
        "test_one_per_role_without_group_names",
        "tests/test_exporter.py::test_a_trace_without_a_summary_stays",
        "tests/test_exporter.py::test_temporary_files_are_removed",
        "tests/test_exporter.py::test_a_capture_has_its_name_only_when_its_sinks_have_run",
        "tests/test_exporter.py::test_one_process_finishes",
        "tests/test_exporter.py::test_a_job_never_calls_what_is_no_sink",
        "tests/test_exporter.py::test_instances_and_mappings_both_reach_the_exporter",
        "tests/test_exporter.py::test_failing_sink_costs_only_itself",
        "tests/test_exporter.py::test_ctrl_c_in_an_inline_sink",
        "tests/test_session.py::test_failing_sink_stops_nothing_else",
        "tests/test_threads.py::test_steps_of_several_threads",
    ],
    "instrument/annotate/wrapper.py": _top("wrap", "names", "annotate", "nests"),
    "instrument/read/facts/autograd.py": _capture("autograd", "ranges", "operators", "breakdown", "flops"),
    "instrument/read/facts/call_tree.py": [
        *_capture("nesting", "paths", "ranges", "operators", "stacks"),
        "tests/capture/test_synchronisations.py::test_the_places_that_wait_by_hand",
    ],
    "instrument/read/facts/flops.py": _capture("flops", "operators", "efficiency"),
    "instrument/read/facts/traffic.py": _capture("efficiency"),
    "instrument/read/facts/intervals.py": _capture("timeline", "breakdown", "steps"),
    "instrument/read/facts/launches.py": [
        *_capture("groupby", "kernels", "operators", "breakdown", "autograd", "ranges"),
        "tests/capture/test_coverage.py::test_rows_and_likely_causes_by_hand",
        "tests/capture/test_synchronisations.py::test_what_a_wait_waits_for_by_hand",
        "tests/capture/test_efficiency.py::test_efficiency_by_hand",
    ],
    "instrument/read/facts/links.py": _capture("ranges", "operators", "flops"),
    "instrument/read/facts/paths.py": _capture("paths", "ranges"),
    "instrument/read/facts/step_index.py": _capture("steps", "ranges", "operators"),
    "instrument/read/facts/synchronisation.py": _capture("synchronisations"),
    "instrument/read/facts/device_work.py": _capture("breakdown", "steps"),
    "instrument/read/views/launch_queue.py": _capture("launch_queue"),
    "instrument/read/facts/grammars.py": _capture("engines"),
    "instrument/read/views/phases.py": _capture("engines"),
    "instrument/read/facts/cuda_graphs.py": _capture("cuda_graphs"),
    "instrument/read/views/cuda_graphs.py": _capture("cuda_graphs"),
    "instrument/read/views/kernels.py": _capture("kernels", "breakdown", "cuda_graphs"),
    "instrument/read/views/efficiency.py": _capture("efficiency"),
    "instrument/read/views/peak_rates.py": _capture("efficiency"),
    "instrument/read/views/operators.py": [
        *_capture("operators", "flops", "table"),
        "tests/capture/test_efficiency.py::test_autocast_counts_the_call_with_the_types_that_are_multiplied",
    ],
    "instrument/read/views/ranges.py": [
        *_capture("ranges", "autograd", "flops"),
        "tests/report/page/test_payload.py::test_steps_of_ranges_sum_to_the_tree",
    ],
    "instrument/read/views/steps.py": _capture("steps"),
    "instrument/read/views/witness.py": _capture("witness"),
    "instrument/read/views/synchronisations.py": _capture("synchronisations"),
    "instrument/read/views/memory_timeline.py": [*_capture("live_memory"), "tests/sinks/test_memory_sink.py"],
    "instrument/read/facts/memory_attribution.py": _capture("operators", "live_memory"),
    "instrument/read/ranks/rank_comparison.py": [*_capture("run"), "tests/test_ranks_command.py"],
    "instrument/read/ranks/shards.py": _capture("shards"),
}  # fmt: skip


class Planted(NamedTuple):
    """An edit, and the test that must notice it."""

    name: str
    module: str
    was: str
    now: str
    test: str


_STEP_BY_STEP = "tests/test_schedule.py::test_schedule_equals_torchs"
PLANTED = [
    Planted(
        "the schedule off by one",
        "instrument/record/config/schedule.py",
        "None if schedule.active is None else first + schedule.active - 1)",
        "None if schedule.active is None else first + schedule.active)",
        _STEP_BY_STEP,
    ),
    Planted(
        "skip_first off by one",
        "instrument/record/config/schedule.py",
        "begin = schedule.skip_first + schedule.wait",
        "begin = schedule.skip_first + 1 + schedule.wait",
        _STEP_BY_STEP,
    ),
    Planted(
        "repeat off by one",
        "instrument/record/config/schedule.py",
        "0 < schedule.repeat <= number",
        "0 < schedule.repeat < number",
        _STEP_BY_STEP,
    ),
    Planted(
        "self time with children",
        "instrument/read/facts/call_tree.py",
        "return totals - Groups(self.parent, len(self)).sum(totals)",
        "return totals",
        "tests/capture/test_ranges.py::test_ranges_by_hand",
    ),
    Planted(
        "priority of the breakdown swapped",
        "instrument/read/facts/device_work.py",
        "_LAYERS = ((KERNEL, MEMSET), (COMMUNICATION,), (COPY,))",
        "_LAYERS = ((COMMUNICATION,), (KERNEL, MEMSET), (COPY,))",
        "tests/capture/test_breakdown.py::test_overlaps_by_hand",
    ),
    Planted(
        "backward joined without the thread",
        "instrument/read/facts/autograd.py",
        "last = np.append((np.diff(sequence) != 0) | (np.diff(thread) != 0), True)",
        "last = np.append(np.diff(sequence) != 0, True)",
        "tests/capture/test_autograd.py::test_where_the_time_of_the_backward_goes",
    ),
    Planted(
        "steps by start instead of containment",
        "instrument/read/facts/intervals.py",
        "(at >= 0) & (time_ns < np.append(ends, 0)[at])",
        "at >= 0",
        "tests/capture/test_steps.py::test_a_step_without_device_work_has_none_where_others_have",
    ),
    Planted(
        "metrics: calls counted as those of others move to a new series",
        "instrument/record/metrics.py",
        "self._before[name] = self._last.get(name, zero)",
        "self._before[name] = zero",
        "tests/test_metrics.py::test_a_range_that_becomes_costly_keeps_nothing_of_what_the_others_had",
    ),
    Planted(
        "retention removes the newest of those it may",
        "instrument/base/queue.py",
        "for folder in captures[:-1]:",
        "for folder in reversed(captures[:-1]):",
        "tests/test_captures.py::test_keep_leaves_the_last_captures[inline]",
    ),
    Planted(
        "a backward inside a backward ends a step",
        "instrument/record/unedited.py",
        'if kind != "optimizer" and torch._C._current_graph_task_id() != -1:',
        'if kind == "forward" and torch._C._current_graph_task_id() != -1:',
        "tests/test_run_command.py::test_found_steps_and_models[checkpointed]",
    ),
    Planted(
        "an optimizer that is made anew in each step ends it",
        "instrument/record/unedited.py",
        "if self._seen else its",
        "if self._called else its",
        "tests/test_run_command.py::test_found_steps_and_models[meta]",
    ),
    Planted(
        "retention removes the last capture",
        "instrument/base/queue.py",
        "for folder in captures[:-1]:",
        "for folder in captures:",
        "tests/test_captures.py::test_a_disk_budget_removes_the_oldest_and_never_the_last",
    ),
    Planted(
        "renamed before capture.json is written",
        "instrument/base/queue.py",
        """    _write_new(staging / METADATA_FILE, _as_text({**metadata, "name": name}))
    staging.rename(folder)
""",
        """    staging.rename(folder)
    _write_new(folder / METADATA_FILE, _as_text({**metadata, "name": name}))
""",
        "tests/test_exporter.py::test_a_window_without_its_capture_json_is_not_queued",
    ),
    Planted(
        "a sink is noted before it has run",
        "instrument/export/window.py",
        "            if is_after or name not in queue.sinks_run(folder):\n",
        "            queue.note_sink(folder, name)\n            if is_after:\n",
        "tests/test_exporter.py::test_export_process_logs_in_order",
    ),
    Planted(
        "a capture is published before its sinks have run",
        "instrument/export/window.py",
        "    _summarize(capture, folder, failed)\n",
        "    _summarize(capture, folder, failed)\n    folder = queue.publish(folder, about)\n",
        "tests/test_exporter.py::test_a_capture_has_its_name_only_when_its_sinks_have_run",
    ),
    Planted(
        "rank 1's folder is called rank 0",
        "instrument/base/queue.py",
        'last:06d}_rank{rank}"',
        'last:06d}_rank0"',
        "tests/test_ranks.py::test_rank_in_name_and_metadata",
    ),
    Planted(
        "each rank that sees a trigger announces",
        "instrument/record/trigger_runner.py",
        "self._is_answered(after_step) or announcements.announce(",
        "announcements.announce(",
        "tests/test_ranks.py::test_of_all_ranks_that_see_it_at_once_one_announces",
    ),
    Planted(
        "the trace of a role that has no other rank is removed",
        "instrument/export/window.py",
        "return bool(words) and words <= _DATA_PARALLEL",
        "return bool(words & _DATA_PARALLEL)",
        "tests/test_exporter.py::"
        "test_one_per_role_keeps_traces",
    ),
    Planted(
        "requests through a proxy are local",
        "instrument/integrations/asgi.py",
        "direct = own_site and not any(name.startswith(_OF_PROXIES) for name in headers)",
        "direct = own_site",
        "tests/integrations/test_asgi.py::test_without_token_only_localhost",
    ),
    Planted(
        "a window that no exporter takes refuses all later ones",
        "instrument/integrations/asgi.py",
        'in ("waiting", "recording"):',
        'in ("waiting", "recording", "exporting"):',
        "tests/integrations/test_asgi.py::"
        "test_window_without_exporter_stays_exporting",
    ),
    Planted(
        "a lost label of truncation",
        "instrument/record/step_loop.py",
        '"truncated": reason is not None,',
        '"truncated": False,',
        "tests/test_window_limit.py::test_a_window_over_its_time_ends_with_the_step",
    ),
    Planted(
        "the tasks of Slurm's array do not count from 0",
        "instrument/read/ranks/shards.py",
        "(int(task) - int(first or 0)) // int(step or 1)",
        "int(task) // int(step or 1)",
        "tests/capture/test_shards.py::test_a_job_array_says_which_part_it_is",
    ),
    Planted(
        "cooldown ignored",
        "instrument/record/trigger_runner.py",
        "self.cooldown_until = number + 1 + self.cooldown",
        "self.cooldown_until = number + 1",
        "tests/triggers/test_watch.py::test_a_trigger_rests_and_has_a_last_window",
    ),
    Planted(
        "shares of all that was recorded instead of the steps",
        "instrument/read/views/ranges.py",
        'return int(work(capture)["counted_cpu_ns"].sum())',
        'return int(work(capture)["cpu_ns"].sum())',
        "tests/capture/test_ranges.py::test_ranges_by_hand",
    ),
    Planted(
        "an unknown count as part of a sum",
        "instrument/read/views/table.py",
        "pl.when(values.count() > 0)",
        "pl.when(values.count() >= 0)",
        "tests/capture/test_operators.py::test_what_a_row_does_not_know_of_some_calls_is_left_out_of_its_sum",
    ),
    Planted(
        "0 where nothing is known",
        "instrument/read/facts/groupby.py",
        "[cell if is_known else None for",
        "[cell for",
        "tests/capture/test_groupby.py::test_sums_are_exact_and_unknown_where_nothing_counts",
    ),
]  # fmt: skip

# Module, line, edited line: why nothing that a user sees changes.
EQUIVALENT = {
    (
        "instrument/read/facts/synchronisation.py",
        "-1 if each is None else work.streams.get((of_device, each.waits_for_stream), -1)",
        "-1 if each is None else work.streams.get((of_device, each.waits_for_stream), -2)",
    ): "any number below 0 says that there is none",
    (
        "instrument/read/facts/synchronisation.py",
        "device = np.where(stated, waits.device[chosen], 0 if len(work.devices) == 1 else -1)",
        "device = np.where(stated, waits.device[chosen], 0 if len(work.devices) == 1 else -2)",
    ): "any number below 0 says that there is none",
    (
        "instrument/read/ranks/rank_comparison.py",
        "usual = median_low(own) if own else 0",
        "usual = median_low(own) if own else 1",
    ): "without such ranks the table is empty",
    (
        "instrument/record/step_loop.py",
        "counter.next_event_step = counter.step_number + 1",
        "counter.next_event_step = counter.step_number - 1",
    ): "both lines: at the end of a step it only matters whether the number is above that of the next step",
    (
        "instrument/read/facts/synchronisation.py",
        "found: Ints = np.append(self.first, -1)[self.by_launch.since(stream, time_ns)]",
        "found: Ints = np.append(self.first, -2)[self.by_launch.since(stream, time_ns)]",
    ): "any number below 0 says that there is none",
    (
        "instrument/read/facts/traffic.py",
        "size = _SIZES[int(kind)] if kind else call.size(0)",
        "size = _SIZES[int(kind)] if kind else call.size(1)",
    ): "torch scales and multiplies only matrices whose elements have one size",
    (
        "instrument/read/facts/launches.py",
        "return first[np.where((wanted >= 0) & (wanted <= most), wanted, most + 1)]",
        "return first[np.where((wanted > 0) & (wanted <= most), wanted, most + 1)]",
    ): "the entry of the id 0 says, as the last one does, that there is none",
    (
        "instrument/read/facts/synchronisation.py",
        "kind_of_event = np.where(is_call, kind_of_name[events.name], -1)",
        "kind_of_event = np.where(is_call, kind_of_name[events.name], -2)",
    ): "any number below 0 says that there is none",
    (
        "instrument/read/facts/call_tree.py",
        "until = np.append(0, np.cumsum(chosen))[self.until[kept]]",
        "until = np.append(1, np.cumsum(chosen))[self.until[kept]]",
    ): "`until` is never 0",
    (
        "instrument/read/facts/call_tree.py",
        "wrong, equal = thread[1:] < thread[:-1], thread[1:] == thread[:-1]",
        "wrong, equal = thread[1:] <= thread[:-1], thread[1:] == thread[:-1]",
    ): "speed: events in order are sorted once more",
    (
        "instrument/record/config/schedule.py",
        "begin += number * (schedule.wait + schedule.warmup + (schedule.active or 0))",
        "begin += number * (schedule.wait + schedule.warmup + (schedule.active or 1))",
    ): "without `active` there is only the cycle 0",
    (
        "instrument/read/facts/autograd.py",
        "unattributed = backward & ((owner == unknown) | np.append(backward, [False, False])[owner])",
        "unattributed = backward & ((owner == unknown) | np.append(backward, [False, True])[owner])",
    ): "the last entry is that of `unknown`",
    (
        "instrument/record/step_loop.py",
        "or run is None",
        "and run is None",
    ): "a recorder that has started has a planned window and a run",
    (
        "instrument/read/facts/call_tree.py",
        "if loops.compiled is None or not len(thread):",
        "if loops.compiled is None or len(thread):",
    ): "both ways give the same columns; without the C extension, many tests fail",
    (
        "instrument/read/views/kernels.py",
        "launch_ns = np.where(known, events.duration_ns[work.call], -1)",
        "launch_ns = np.where(known, events.duration_ns[work.call], -2)",
    ): "any number below 0 says that there is none",
    (
        "instrument/read/facts/autograd.py",
        "recording = np.bincount(enclosing[enclosing >= 0], minlength=len(paths.names))",
        "recording = np.bincount(enclosing[enclosing >= 1], minlength=len(paths.names))",
    ): "what counts is inside the range of an optimizer, and the first path is inside no other",
    (
        "instrument/read/facts/launches.py",
        "if keys.min() >= 0 and most <= 4 * len(key):",
        "if keys.min() >= 0 and most <= 4 // len(key):",
    ): "speed: the sort finds the same events as the table",
    (
        "instrument/read/facts/launches.py",
        "first = np.full(most + 2, -1)",
        "first = np.full(most + 3, -1)",
    ): "a table with one more entry, which is not looked up",
    (
        "instrument/read/facts/traffic.py",
        "result = call.dims[1][-2] * call.dims[2][-1] * call.size(1)",
        "result = call.dims[1][-2] * call.dims[2][-1] * call.size(2)",
    ): "torch multiplies only matrices of one type",
    (
        "instrument/export/window.py",
        "(folder / _LOCK_FILE).unlink(missing_ok=True)",
        "(folder / _LOCK_FILE).unlink(missing_ok=False)",
    ): "the file is missing on Windows alone, which has no such lock",
    (
        "instrument/annotate/wrapper.py",
        "if exact and isinstance(function, FunctionType):",
        "if exact or isinstance(function, FunctionType):",
    ): "a variadic wrapper has no parameter that a default could be of",
    (
        "instrument/annotate/wrapper.py",
        "return False",
        "return True",
    ): "speed: a name with a lone brace fails as a format on each call, and is then taken as it stands",
    (
        "instrument/read/facts/autograd.py",
        "sums = np.flatnonzero(is_sum & ~((scopes.parent >= 0) & is_sum[scopes.parent]))",
        "sums = np.flatnonzero(is_sum & ~((scopes.parent > 0) & is_sum[scopes.parent]))",
    ): "an accumulation inside the first scope of all has no node before it either way",
    (
        "instrument/read/facts/autograd.py",
        "sums = np.flatnonzero(is_sum & ~((scopes.parent >= 0) & is_sum[scopes.parent]))",
        "sums = np.flatnonzero(is_sum & ~((scopes.parent >= 1) & is_sum[scopes.parent]))",
    ): "as above",
    (
        "instrument/record/step_loop.py",
        'first = self.train.step_number if self.config.phases == ["train"] else 0',
        'first = self.train.step_number if not (self.config.phases == ["train"]) else 0',
    ): "speed: what a window imports is imported at the start or by the window",
    (
        "instrument/read/facts/call_tree.py",
        "width, numbers = int(name.max(initial=0)) + 1, Interned()",
        "width, numbers = int(name.max(initial=0)) + 2, Interned()",
    ): "the width only has to be above every name's number",
    (
        "instrument/base/queue.py",
        "text = json.dumps(metadata, indent=2, default=repr)",
        "text = json.dumps(metadata, indent=3, default=repr)",
    ): "only the look of the file",
    (
        "instrument/read/views/memory_timeline.py",
        "self, by: By | None = None, *, device: str | None = None, most: int = 8, points: int = 1000",
        "self, by: By | None = None, *, device: str | None = None, most: int = 8, points: int = 1001",
    ): "how fine a picture is",
    (
        "instrument/record/step_loop.py",
        "self._paused_ns[part] = self._paused_ns.get(part, 0) + time.perf_counter_ns() - began",
        "self._paused_ns[part] = self._paused_ns.get(part, 1) + time.perf_counter_ns() - began",
    ): "a nanosecond of a duration",
    (
        "instrument/read/views/steps.py",
        "return np.where(work.launch >= 0, step_at(events, index, launched_ns(events, work)), -1)",
        "return np.where(work.launch >= 0, step_at(events, index, launched_ns(events, work)), -2)",
    ): "any number below 0 says that there is none",
    (
        "instrument/read/facts/flops.py",
        '"aten::dot": _matrix_vector(0),',
        '"aten::dot": _matrix_vector(1),',
    ): "both operands of a dot product have the same length",
    (
        "instrument/record/step_loop.py",
        "if counter.step_number + 1 < counter.next_event_step:",
        "if counter.step_number + 2 < counter.next_event_step:",
    ): "speed: one step earlier takes the longer way, with the same result",
    (
        "instrument/record/config/schedule.py",
        'return next(at for at in count(step) if at - step >= _LONGEST or action(at) != "RECORD")',
        'return next(at for at in count(step) if at - step > _LONGEST or action(at) != "RECORD")',
    ): "how far a function is asked before its window counts as endless",
    (
        "instrument/read/facts/synchronisation.py",
        "free_ns = np.where(before >= 0, np.append(work.end_ns, 0)[before], launch_ns)",
        "free_ns = np.where(before >= 0, np.append(work.end_ns, 1)[before], launch_ns)",
    ): "the last entry is for -1, where the launch's time is taken",
    (
        "instrument/read/facts/call_tree.py",
        "wrong |= equal & (end[1:] > end[:-1])",
        "wrong |= equal | (end[1:] > end[:-1])",
    ): "speed: what is in order is sorted all the same",
    (
        "instrument/record/step_loop.py",
        "self.current.next_event_step = self.current.step_number + 1",
        "self.current.next_event_step = self.current.step_number - 1",
    ): "the next step is past both numbers",
    (
        "instrument/read/facts/flops.py",
        "arguments = decoded(events.texts[concrete]) if concrete >= 0 else []",
        "arguments = decoded(events.texts[concrete]) if concrete > 0 else []",
    ): "as above",
    (
        "instrument/read/facts/flops.py",
        "arguments: list[str] = decoded(events.texts[concrete]) if concrete >= 0 else []",
        "arguments: list[str] = decoded(events.texts[concrete]) if concrete > 0 else []",
    ): "as above",
    (
        "instrument/read/views/kernels.py",
        "return np.where(counts, launch_ns, 0), (launch_ns >= 0) & (ran[work.call] < launch_ns)",
        "return np.where(counts, launch_ns, 0), (launch_ns > 0) & (ran[work.call] < launch_ns)",
    ): "no event is shorter than a launch of no time",
    (
        "instrument/read/facts/autograd.py",
        "scope = scope[scope >= 0]",
        "scope = scope[scope > 0]",
    ): "the first range of all is inside no optimizer step",
    (
        "instrument/read/facts/autograd.py",
        "recording = np.bincount(enclosing[enclosing >= 0], minlength=len(paths.names))",
        "recording = np.bincount(enclosing[enclosing > 0], minlength=len(paths.names))",
    ): "as above",
    (
        "instrument/read/facts/call_tree.py",
        "same = np.append((thread[1:] == thread[:-1]) & (start[1:] == start[:-1]), False)",
        "same = np.append((thread[1:] == thread[:-1]) & (start[1:] == start[:-1]), True)",
    ): "speed: what is in order is sorted all the same",
    (
        "instrument/record/step_loop.py",
        "loop_left: bool = False",
        "loop_left: bool = True",
    ): "it is read only while a batch is open, and set where one is opened",
}
