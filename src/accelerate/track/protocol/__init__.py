"""The parts that all trackers share beside their base: conversion of values, images and tables."""
