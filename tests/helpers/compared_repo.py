"""A small git repository whose run_train.sh writes the numbers at once, for tests of loss_compare."""

import subprocess
import sys
from pathlib import Path

# Losses come from values.txt of the tree that runs, so that a test sees which code ran; an option may change them.
RUN_TRAIN = (
    f"#!{sys.executable} -IS"
    + """
import json, os, signal, subprocess, sys, time
from pathlib import Path
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
tree = Path(__file__).resolve().parent
folder = Path(options["job.dump_folder"])
names = ["NGPU", "CONFIG_FILE", "TRAIN_FILE", "PYTHON", "PYTHONPATH"]
seen = {"argv": sys.argv[1:], "tree": str(tree), "cwd": os.getcwd(), "files": sorted(os.listdir(tree))}
(folder / "seen.json").write_text(json.dumps(seen | {name: os.environ.get(name) for name in names}))
print("a run of", tree)
if "--checkpoint.create_seed_checkpoint" in sys.argv:
    (folder / "checkpoint/step-0").mkdir(parents=True)
    sys.exit(0)
if "edit" in options:
    Path(options["edit"]).write_text("0.0\\n" * 5)
if "sleep" in options:
    if options["sleep"] == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "60"])
    print("sleeping", child.pid, flush=True)
    time.sleep(60)
if "fail" in options:
    sys.exit("the run failed as asked")
values = [float(line) for line in (tree / "values.txt").read_text().split()]
for change in options.get("change", "").split(","):
    if change:
        step, amount = change.split(":")
        values[int(step) - 1] += float(amount)
if "runs" in options:  # what every run moves: it differs from the one before
    with open(options["runs"], "a") as runs:
        runs.write("x")
    values[4] += os.path.getsize(options["runs"])
count = int(options.get("logged", options["training.steps"]))
with (folder / "metrics.jsonl").open("w") as file:
    for step, value in enumerate(values[:count], 1):
        norm = value / 2
        row = {"step": step, "loss": value, "loss_hex": value.hex(), "grad_norm": norm, "grad_norm_hex": norm.hex()}
        file.write(json.dumps(row) + "\\n")
    file.write(options.get("trailer", ""))
"""
)


def git(repo: Path, *arguments: str) -> str:
    """Return the output of a git command."""
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(["git", *identity, *arguments], cwd=repo, check=True, capture_output=True, text=True).stdout


def make_compared_repo(repo: Path) -> Path:
    """Make a repository of two commits, `old` and main, and two more files; returns its path."""
    (repo / "scripts").mkdir(parents=True)
    (repo / "run_train.sh").write_text(RUN_TRAIN)
    (repo / "run_train.sh").chmod(0o755)
    (repo / "scripts/environment.sh").write_text("use_environment() { echo made once; PYTHON=/some/python; }\n")
    (repo / ".gitignore").write_text("*.log\n")
    (repo / "values.txt").write_text("9.0\n8.0\n7.0\n6.0\n5.0\n")
    git(repo, "init", "-q", "-b", "main")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "old")
    git(repo, "tag", "old")
    (repo / "values.txt").write_text("9.0\n8.0\n7.0\n6.0000003\n5.0\n")
    git(repo, "commit", "-qam", "new")
    (repo / "untracked.txt").write_text("")
    (repo / "ignored.log").write_text("")
    return repo
